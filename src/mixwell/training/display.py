"""What a run shows while it trains: a picture that is redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from mixwell.utils.terminal import say

LINE_SECONDS = 10.0
LINE_DOMAINS = 8
"""Domains in a line where there is no terminal."""
BAR = 30
HEADER_LINES = 5
"""Lines of the display in addition to those of domains: step, progress, header, hidden domains, cursor."""


class Watch:
    """Follows the progress of a run. The defaults do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start_at(self, step: int, weights: Mapping[str, float]) -> None:
        """Handle the start of training, after ``step`` steps of an earlier process."""

    def step(self, done: int, loss: float, losses: Mapping[str, float]) -> None:
        """Handle a step that is done."""

    def weights(self, weights: Mapping[str, float]) -> None:
        """Handle new weights."""

    def evaluated(self, validation: float) -> None:
        """Handle a new validation loss."""


@final
class Display(Watch):
    """Shows steps, losses, weights as bars, and the time left."""

    def __init__(self, steps: int, names: tuple[str, ...], *, console: Console) -> None:
        self._steps, self._names, self._console = steps, names, console
        self._loss = self._validation = float("nan")
        self._losses: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._done = self._first = 0
        self._begun = self._shown_at = 0.0
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            get_renderable=self._drawn,
            redirect_stderr=False,
        )

    @override
    def __enter__(self) -> Self:
        self._begun = self._shown_at = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    @override
    def start_at(self, step: int, weights: Mapping[str, float]) -> None:
        self._done = self._first = step
        self._weights = dict(weights)

    @override
    def step(self, done: int, loss: float, losses: Mapping[str, float]) -> None:
        self._done, self._loss = done, loss
        self._losses.update(losses)
        now = time.monotonic()
        if self._console.is_terminal:
            if now - self._shown_at > 0.2:
                self._shown_at = now
                self._live.refresh()
        elif now - self._shown_at > LINE_SECONDS:
            self._shown_at = now
            say(self._console, self._line())

    @override
    def weights(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)

    @override
    def evaluated(self, validation: float) -> None:
        self._validation = validation

    def _seconds_left(self) -> float | None:
        made = self._done - self._first
        if not made:
            return None
        return (self._steps - self._done) * (time.monotonic() - self._begun) / made

    def _line(self) -> str:
        shown = heaviest(self._weights, LINE_DOMAINS)
        weights = " ".join(f"{name} {self._weights[name]:.3f}" for name in shown)
        if len(shown) < len(self._weights):
            weights += f" ({_hidden(self._weights, shown)})"
        validation = "" if self._validation != self._validation else f", validation {self._validation:.4f}"
        left = self._seconds_left()
        ending = "" if left is None else f", about {_time(left)} left"
        return (
            f"step {self._done}/{self._steps}, loss {self._loss:.4f}{validation}, weights {weights}{ending}"
        )

    def _drawn(self) -> Group:
        left = self._seconds_left()
        head = f"step {self._done}/{self._steps}   loss {self._loss:.4f}"
        if self._validation == self._validation:
            head += f"   validation {self._validation:.4f}"
        if left is not None:
            head += f"   {_time(left)} left"
        table = Table(box=None, padding=(0, 1), show_header=True, header_style="dim")
        for column in ("domain", "weight", "", "loss"):
            table.add_column(column, justify="right" if column in ("weight", "loss") else "left")
        weights = {name: self._weights.get(name, 0.0) for name in self._names}
        shown = heaviest(weights, max(self._console.height - HEADER_LINES, 1))
        for name in shown:
            weight = weights[name]
            bar = Text("█" * round(BAR * weight), style="cyan")
            bar.append("░" * (BAR - round(BAR * weight)), style="dim")
            loss = self._losses.get(name)
            table.add_row(Text(name), f"{weight:.3f}", bar, "" if loss is None else f"{loss:.4f}")
        share = self._done / self._steps
        line = Text("━" * round(60 * share), style="green")
        line.append("━" * (60 - round(60 * share)), style="dim")
        below = [] if len(shown) == len(weights) else [Text(f" {_hidden(weights, shown)}", style="dim")]
        return Group(Text(head, no_wrap=True), line, table, *below)


def heaviest(weights: Mapping[str, float], count: int) -> list[str]:
    """Return the names with the greatest weights, at most ``count``, the heaviest first.

    Example:
        >>> heaviest({"a": 0.2, "b": 0.5, "c": 0.3}, 2)
        ['b', 'c']
    """
    return sorted(weights, key=lambda name: -weights[name])[:count]


def _hidden(weights: Mapping[str, float], shown: Sequence[str]) -> str:
    rest = [weight for name, weight in weights.items() if name not in shown]
    return f"{len(rest)} more, with {sum(rest):.3f} of the weight"


@final
class Tokenizing:
    """A progress bar while text is tokenized; nothing where it is quick or there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("tokenizing {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def track(self, name: str, size: int | None) -> Callable[[int], None]:
        """Begin another source of ``size`` bytes, if known; return a function to call with the bytes done."""
        task = self._bar.add_task(name, total=size, visible=False)

        def update(done: int) -> None:
            self._bar.update(task, completed=done, visible=True)

        return update


def _time(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{whole % 60:02d} min"
