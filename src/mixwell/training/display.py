"""What a run shows while it trains: a picture that is redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mixwell.utils.terminal import say

LINE_SECONDS = 10.0
BAR = 30


class Watch:
    """Is told what happens in a run. This one does nothing with it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start_at(self, step: int, weights: Mapping[str, float]) -> None:
        """Training begins or goes on.

        Args:
            step: steps done before.
            weights: of the domains.
        """

    def step(self, done: int, loss: float, losses: Mapping[str, float]) -> None:
        """A step is done.

        Args:
            done: steps so far.
            loss: of the batch.
            losses: by domain.
        """

    def weights(self, weights: Mapping[str, float]) -> None:
        """The weights were updated.

        Args:
            weights: the new ones.
        """

    def evaluated(self, validation: float) -> None:
        """The validation loss was measured.

        Args:
            validation: the loss.
        """


@final
class Display(Watch):
    """Steps, losses, weights as bars, and the time left.

    Args:
        steps: of the whole run.
        names: of the domains.
        console: where to.
    """

    def __init__(self, steps: int, names: tuple[str, ...], *, console: Console) -> None:
        self._steps, self._names, self._console = steps, names, console
        self._loss = self._validation = float("nan")
        self._losses: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._done = self._first = 0
        self._begun = self._told = 0.0
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            get_renderable=self._drawn,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._begun = self._told = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def start_at(self, step: int, weights: Mapping[str, float]) -> None:
        """Count the time from here.

        Args:
            step: steps done before.
            weights: of the domains.
        """
        self._done = self._first = step
        self._weights = dict(weights)

    def step(self, done: int, loss: float, losses: Mapping[str, float]) -> None:
        """Show it, not more often than can be read.

        Args:
            done: steps so far.
            loss: of the batch.
            losses: by domain.
        """
        self._done, self._loss = done, loss
        self._losses.update(losses)
        now = time.monotonic()
        if self._console.is_terminal:
            if now - self._told > 0.2:
                self._told = now
                self._live.refresh()
        elif now - self._told > LINE_SECONDS:
            self._told = now
            say(self._console, self._line())

    def weights(self, weights: Mapping[str, float]) -> None:
        """Show them from now on.

        Args:
            weights: the new ones.
        """
        self._weights = dict(weights)

    def evaluated(self, validation: float) -> None:
        """Show it from now on.

        Args:
            validation: the loss.
        """
        self._validation = validation

    def _seconds_left(self) -> float | None:
        made = self._done - self._first
        if not made:
            return None
        return (self._steps - self._done) * (time.monotonic() - self._begun) / made

    def _line(self) -> str:
        weights = " ".join(f"{name} {value:.3f}" for name, value in self._weights.items())
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
        for name in self._names:
            weight = self._weights.get(name, 0.0)
            bar = Text("█" * round(BAR * weight), style="cyan")
            bar.append("░" * (BAR - round(BAR * weight)), style="dim")
            loss = self._losses.get(name)
            table.add_row(Text(name), f"{weight:.3f}", bar, "" if loss is None else f"{loss:.4f}")
        share = self._done / self._steps
        line = Text("━" * round(60 * share), style="green")
        line.append("━" * (60 - round(60 * share)), style="dim")
        return Group(Text(head), line, table)


@final
class Tokenizing:
    """A bar while text is turned into tokens; nothing where it is quick or there is no terminal.

    Args:
        console: where to.
    """

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
        """Begin with another source.

        Args:
            name: of the source.
            size: its bytes, where they are known.

        Returns:
            A function that is told the bytes done.
        """
        task = self._bar.add_task(name, total=size, visible=False)

        def tell(done: int) -> None:
            self._bar.update(task, completed=done, visible=True)

        return tell


def _time(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{whole % 60:02d} min"
