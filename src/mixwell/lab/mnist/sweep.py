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
from mixwell.lab.mnist.experiment import DOMAINS, Outcome, Run, Setting
from mixwell.lab.tables import Row
from mixwell.reference.theory import stochastic_horizon
from mixwell.training.engines import LOCAL, Engine, Job
from mixwell.training.sweeps import begun, run_sweep
from mixwell.utils import environment
from mixwell.utils.files import lock_folder

RUNS, WEIGHTS, CHECKPOINTS = "runs.csv", "weights.csv", "unfinished"
_NAMED = ("budget", "horizon", "seed", "channels", "batch_size")


def default_horizons(budget: int) -> list[int]:
    """1, 2, 5, 10, ... and N, with the theory's ``ceil(sqrt(N log N))`` among them.

    Args:
        budget: N.

    Returns:
        The horizons; those within a tenth of the theory's give way to it.

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
) -> list[Setting]:
    """The runs of a sweep, seed by seed, so that what is there first is a whole curve.

    Args:
        budgets: of training steps.
        horizons: for each budget, those beyond it left out; ``None`` for :func:`default_horizons`.
        batch_sizes: of the runs.
        seeds: how many, from 0.
        **shared: other fields of every :class:`Setting`.

    Returns:
        The settings.

    Raises:
        ValueError: nothing is left to run.
    """
    if seeds < 1:
        raise ValueError(f"a sweep needs at least 1 seed, got {seeds}")
    found = [
        Setting(budget=budget, horizon=horizon, seed=seed, batch_size=rows, **shared)
        for seed, budget, rows in product(range(seeds), sorted(set(budgets)), sorted(set(batch_sizes)))
        for horizon in sorted(set(horizons or default_horizons(budget)))
        if horizon <= budget
    ]
    if not found:
        raise ValueError(f"no horizon of {horizons} is within a budget of {list(budgets)} steps")
    return found


def name_of(setting: Setting) -> str:
    """A short name of a run; settings that are not in it and not the defaults go in as a checksum.

    Args:
        setting: of the run.

    Returns:
        The name, fit for a file.

    Example:
        >>> name_of(Setting(budget=1000, horizon=84, seed=0))
        'n1000-t84-s0-c32-b256'
    """
    values = asdict(setting)
    name = "n{budget}-t{horizon}-s{seed}-c{channels}-b{batch_size}".format(**values)
    others = {f.name: values[f.name] for f in fields(Setting) if f.name not in _NAMED}
    if all(others[f.name] == f.default for f in fields(Setting) if f.name in others):
        return name
    return f"{name}-{hashlib.sha256(json.dumps(others).encode()).hexdigest()[:8]}"


class Results:
    """The results in a folder: one row per run in ``runs.csv``, the weights over time in ``weights.csv``.

    Args:
        folder: of the results.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = tables.read(folder / RUNS)
        """One row per run: its settings, losses and accuracies, final and average weights."""
        self.weights = tables.read(folder / WEIGHTS)
        """The weights of the domains after rounds of the runs."""

    def missing(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings without a result."""
        done = {row["run"] for row in self.runs}
        return [setting for setting in settings if name_of(setting) not in done]

    def add(self, setting: Setting, outcome: Outcome) -> None:
        """Take up a result and write the tables."""
        name = name_of(setting)
        numbers = {f.name: getattr(outcome, f.name) for f in fields(Outcome)}
        row: Row = {"run": name, **asdict(setting)}
        row |= {key: value for key, value in numbers.items() if isinstance(value, float)}
        row |= {f"last_{domain}": outcome.last[domain] for domain in DOMAINS}
        row |= {f"average_{domain}": outcome.average[domain] for domain in DOMAINS}
        self.runs = [r for r in self.runs if r["run"] != name] + [row]
        done = {r["run"] for r in self.runs}
        course: list[Row] = [{"run": name, "step": step, **weights} for step, weights in outcome.course]
        self.weights = [r for r in self.weights if r["run"] in done - {name}] + course
        # The weights first: a run counts as done by its row in runs.csv.
        tables.write(self.folder / WEIGHTS, sorted(self.weights, key=lambda r: (_order(r["run"]), r["step"])))
        tables.write(self.folder / RUNS, sorted(self.runs, key=lambda r: _order(r["run"])))


def sweep(
    settings: Sequence[Setting],
    folder: Path,
    *,
    workers: int | None,
    console: Console,
    say: Callable[[str], None],
    engine: Engine = LOCAL,
) -> Results:
    """Do the runs that have no result yet.

    Args:
        settings: of the runs.
        folder: for the results; unfinished runs keep their checkpoints in it.
        workers: how many at a time; ``None`` for one per core.
        console: for the progress.
        say: told what is found, fetched and done.
        engine: where they are done.

    Returns:
        The results in the folder.
    """
    with lock_folder(folder):
        results = Results(folder)
        jobs = [Job(name_of(setting), setting.budget, setting) for setting in results.missing(settings)]
        again = begun(folder / CHECKPOINTS, jobs)
        say(
            f"{len(settings)} runs, {len(settings) - len(jobs)} of them done before"
            + (f", {again} begun before" if again else "")
        )
        if jobs:
            mnist_data.load(say=say)
            environment.write(folder)
        run_sweep(
            _run,
            jobs,
            workers=workers,
            checkpoints=folder / CHECKPOINTS,
            on_done=lambda job, outcome: results.add(job.setting, outcome),
            console=console,
            engine=engine,
        )
    return results


def _run(
    setting: Setting, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]
) -> Outcome:
    return Run(setting, _images(), checkpoint=checkpoint).finish(report=report, stopping=stopping)


@cache
def _images() -> mnist_data.Mnist:
    return mnist_data.load()


def _order(name: Any) -> list[Any]:
    """So that t5 comes before t10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(name))]
