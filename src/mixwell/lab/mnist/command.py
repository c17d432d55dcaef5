"""``mixwell reproduce mnist``: run the sweep and print its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mixwell.lab import tables
from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.curves import curve_table, curves_of, verdict
from mixwell.lab.mnist.experiment import DOMAINS, VALIDATION, Domains, MnistSettings
from mixwell.lab.mnist.sweep import settings_of, sweep
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
    engine: Engine = LOCAL,
    **shared: Any,
) -> MnistSettings:
    """Run the sweep, print its curves, and return the settings of one run.

    Args:
        budgets: N, one or several.
        horizons: T, or ``None`` for the defaults.
        batch_sizes: images per domain, one or several.
        workers: number of concurrent runs; ``None`` for one per core.
        **shared: other fields of :class:`MnistSettings`.
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
        title = f"N = {curve.budget}, {curve.label}, {curve.seeds} seed(s)"
        tables.show(console, *curve_table(curve), title=title)
        say("* the theory's T = sqrt(N log N)")
        say(verdict(curve))
    return settings[0]


def examples(settings: MnistSettings) -> list[tuple[str, Any, Any]]:
    """Return name, pixels of shape ``(n, 28, 28)`` and labels of some images of each domain."""
    domains = Domains(mnist_data.load(), settings)
    drawn = {name: domains.draw(name, EXAMPLES) for name in (*DOMAINS, VALIDATION)}
    return [(name, pixels[:, 0].numpy(), labels.numpy()) for name, (pixels, labels) in drawn.items()]
