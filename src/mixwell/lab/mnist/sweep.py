"""A sweep of the MNIST experiment: its runs, and the folder that holds their results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from mixwell.lab import tables
from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.experiment import DOMAINS, Domains, MnistResult, MnistSettings, build, train
from mixwell.lab.tables import Row
from mixwell.reference.theory import stochastic_horizon
from mixwell.training.engines import LOCAL, Engine, Job
from mixwell.training.sweeps import run_sweep
from mixwell.utils import environment
from mixwell.utils.files import lock_folder

RUNS, WEIGHTS = "runs.csv", "weights.csv"
_NAMED = ("budget", "horizon", "seed", "channels", "batch_size")


def default_horizons(budget: int) -> list[int]:
    """Return 1, 2, 5, 10, ... and N, with ``ceil(sqrt(N log N))`` in place of those within a tenth of it.

    Example:
        >>> default_horizons(1000)
        [1, 2, 5, 10, 20, 50, 84, 100, 200, 500, 1000]
    """
    theory = stochastic_horizon(budget)
    series = [digit * 10**power for power in range(len(str(budget))) for digit in (1, 2, 5)]
    kept = {t for t in series if t <= budget and abs(t - theory) > theory / 10}
    return sorted(kept | {theory, budget})


def settings_of(
    *,
    budgets: Sequence[int],
    horizons: Sequence[int] | None,
    batch_sizes: Sequence[int],
    seeds: int,
    **shared: Any,
) -> list[MnistSettings]:
    """Return the runs of a sweep, seed by seed, so that whole curves are finished first.

    Args:
        horizons: used with each budget that is at least as large; ``None`` for :func:`default_horizons`.
        seeds: number of seeds, from 0.
        **shared: other fields of every :class:`MnistSettings`.

    Raises:
        ValueError: There is nothing to run.
    """
    if seeds < 1:
        raise ValueError(f"a sweep needs at least 1 seed, got {seeds}")
    found = [
        MnistSettings(budget=budget, horizon=horizon, seed=seed, batch_size=rows, **shared)
        for seed, budget, rows in product(range(seeds), sorted(set(budgets)), sorted(set(batch_sizes)))
        for horizon in sorted(set(horizons or default_horizons(budget)))
        if horizon <= budget
    ]
    if not found:
        raise ValueError(f"no horizon of {horizons} is within a budget of {list(budgets)} steps")
    return found


def name_of(settings: MnistSettings) -> str:
    """Return a file name of a run; other settings than the defaults are part of it as a checksum.

    Example:
        >>> name_of(MnistSettings(budget=1000, horizon=84, seed=0))
        'n1000-t84-s0-c32-b256'
    """
    values = asdict(settings)
    name = "n{budget}-t{horizon}-s{seed}-c{channels}-b{batch_size}".format(**values)
    others = {f.name: values[f.name] for f in fields(MnistSettings) if f.name not in _NAMED}
    if all(others[f.name] == f.default for f in fields(MnistSettings) if f.name in others):
        return name
    return f"{name}-{hashlib.sha256(json.dumps(others).encode()).hexdigest()[:8]}"


class Results:
    """The results in a folder: one row per run in ``runs.csv``, the weights over time in ``weights.csv``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = tables.read(folder / RUNS)
        """One row per run: its settings, losses and accuracies, final and average weights."""
        self.weights = tables.read(folder / WEIGHTS)
        """The weights of the domains after rounds of the runs."""

    def missing(self, settings: Sequence[MnistSettings]) -> list[MnistSettings]:
        """Return the settings without a result."""
        done = {row["run"] for row in self.runs}
        return [one for one in settings if name_of(one) not in done]

    def add(self, settings: MnistSettings, result: MnistResult) -> None:
        """Add a result and write the tables."""
        name = name_of(settings)
        numbers = {f.name: getattr(result, f.name) for f in fields(MnistResult)}
        row: Row = {"run": name, **asdict(settings)}
        row |= {key: value for key, value in numbers.items() if isinstance(value, float)}
        row |= {f"last_{domain}": result.last[domain] for domain in DOMAINS}
        row |= {f"average_{domain}": result.average[domain] for domain in DOMAINS}
        self.runs = [r for r in self.runs if r["run"] != name] + [row]
        done = {r["run"] for r in self.runs}
        history: list[Row] = [{"run": name, "step": step, **weights} for step, weights in result.history]
        self.weights = [r for r in self.weights if r["run"] in done - {name}] + history
        # The weights first: a run counts as done by its row in runs.csv.
        tables.write(self.folder / WEIGHTS, sorted(self.weights, key=lambda r: (_order(r["run"]), r["step"])))
        tables.write(self.folder / RUNS, sorted(self.runs, key=lambda r: _order(r["run"])))


def sweep(
    settings: Sequence[MnistSettings],
    folder: Path,
    *,
    workers: int | None,
    console: Console,
    say: Callable[[str], None],
    engine: Engine = LOCAL,
) -> Results:
    """Do the runs that have no result in the folder yet, ``workers`` at a time (``None``: one per core)."""
    with lock_folder(folder):
        results = Results(folder)
        jobs = [Job(name_of(one), one.budget, one) for one in results.missing(settings)]
        say(f"{len(settings)} runs, {len(settings) - len(jobs)} of them done before")
        if jobs:
            mnist_data.load(say=say)
            environment.write(folder)
        run_sweep(
            _run,
            jobs,
            workers=workers,
            folder=folder / "unfinished",
            on_done=lambda job, result: results.add(job.setting, result),
            console=console,
            engine=engine,
        )
    return results


def _run(
    settings: MnistSettings, /, *, report: Callable[[int], None], stopping: Callable[[], bool]
) -> MnistResult:
    return train(
        *build(settings),
        Domains(_images(), settings),
        budget=settings.budget,
        report=report,
        stopping=stopping,
    )


@cache
def _images() -> mnist_data.Mnist:
    return mnist_data.load()


def _order(name: Any) -> list[Any]:
    """Return a sort key that puts t5 before t10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(name))]
