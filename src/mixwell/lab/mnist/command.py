"""``mixwell reproduce mnist``: sweep, print, write and draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.curves import Curve, curves_of, findings
from mixwell.lab.mnist.experiment import DOMAINS, VALIDATION, Domains, Setting
from mixwell.lab.mnist.sweep import RUNS, WEIGHTS, settings_of, sweep
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.sweeps import check_workers
from mixwell.utils import terminal

EXAMPLES = 10


def main(
    *,
    budgets: Sequence[int],
    horizons: Sequence[int] | None,
    batch_sizes: Sequence[int],
    seeds: int,
    workers: int | None,
    out: Path,
    figures: bool,
    engine: Engine = LOCAL,
    **shared: Any,
) -> None:
    """The whole command.

    Args:
        budgets: N, one or several.
        horizons: T, or ``None`` for the defaults.
        batch_sizes: images per domain, one or several.
        seeds: how many.
        workers: how many runs at a time; ``None`` for one per core.
        out: folder for the files.
        figures: whether to draw.
        engine: where they are done.
        **shared: other fields of :class:`Setting`.
    """
    check_workers(workers, engine)
    console = Console()

    def say(text: str) -> None:
        terminal.say(console, text)

    settings = settings_of(budgets=budgets, horizons=horizons, batch_sizes=batch_sizes, seeds=seeds, **shared)
    left_out = sorted({t for t in horizons or () if t > min(budgets)})
    if left_out:
        say(f"left out where they are beyond the budget: T = {left_out}")
    results = sweep(settings, out, workers=workers, console=console, say=say, engine=engine)
    for curve in curves_of(results.runs):
        _print_curve(curve, console)
        for line in findings(curve):
            say(line)
    written = [out / RUNS, out / WEIGHTS]
    if figures:
        from mixwell.report import mnist as report

        written += report.draw_examples(examples(settings[0], mnist_data.load(say=say)), out)
        written += report.write([out], out)
    say("written: " + ", ".join(str(path) for path in written))


def examples(setting: Setting, images: mnist_data.Mnist) -> list[tuple[str, Any, Any]]:
    """Some images of each domain and of the validation set.

    Args:
        setting: of the domains.
        images: MNIST.

    Returns:
        Name, pixels of shape ``(n, 28, 28)`` and labels.
    """
    domains = Domains(images, setting)
    found: list[tuple[str, Any, Any]] = []
    for name in (*DOMAINS, VALIDATION):
        pixels, labels = domains.draw(name, EXAMPLES)
        found.append((name, pixels[:, 0].numpy(), labels.numpy()))
    return found


def _print_curve(curve: Curve, console: Console) -> None:
    table = Table(
        title=f"N = {curve.budget}, {curve.label}, {curve.seeds} seed(s)",
        title_justify="left",
        title_style="bold",
    )
    heads = ("T", "validation loss", "accuracy", *(f"w {name}" for name in DOMAINS), "seconds a run")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    names = ("validation_accuracy", *(f"last_{d}" for d in DOMAINS))
    means = {name: curve.mean(name) for name in ("validation_loss", "seconds", *names)}
    spread = curve.spread("validation_loss")
    for index, horizon in enumerate(curve.horizons):
        mark = " *" if horizon == curve.theory else ""
        deviation = f" ± {spread[index]:.3f}" if curve.seeds > 1 else ""
        table.add_row(
            f"{horizon}{mark}",
            f"{means['validation_loss'][index]:.3f}{deviation}",
            *(f"{means[name][index]:.3f}" for name in names),
            f"{means['seconds'][index]:.0f}",
        )
    terminal.show(console, table)
    terminal.say(console, "* the theory's T = sqrt(N log N)")
