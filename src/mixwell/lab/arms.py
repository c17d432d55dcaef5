"""Several ways to train, side by side: the same steps, the same seeds, one table.

An *arm* is a config with some settings changed. All arms train for the same number of steps on batches of the same
size; each is run with every seed. The results are tidy tables in one folder: ``arms.csv`` (one row per run),
``curves.csv`` (validation loss over training) and ``weights.csv`` (the weights of the domains over training), from
which the report is drawn. The runs themselves stay in ``runs/`` beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rich.console import Console

from mixwell.lab import tables
from mixwell.lab.tables import Row
from mixwell.training import concurrent, config_io, metrics, mixture
from mixwell.training.concurrent import Planned
from mixwell.training.config import Config
from mixwell.training.engines import LOCAL, Engine
from mixwell.utils import environment
from mixwell.utils.locks import only_one

RUNS, CURVES, WEIGHTS = "arms.csv", "curves.csv", "weights.csv"


@final
@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        name: of the arm.
        mixer: settings of the mixer that differ.
        domains: only these, where not all are trained on.
    """

    name: str
    mixer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    domains: Sequence[str] | None = None

    def config(self, base: Config, seed: int) -> Config:
        """The settings of a run of this arm.

        Args:
            base: the settings that all arms share.
            seed: of the run.

        Returns:
            The settings.
        """
        plain = base.model_dump(mode="json")
        plain["seed"] = seed
        plain["mixer"] = {**plain["mixer"], **self.mixer}
        if self.domains is not None:
            plain["domains"] = {name: plain["domains"][name] for name in self.domains}
        return config_io.check(plain, where=f"arm {self.name}")


LEARNED = Arm("learned")
UNIFORM = Arm("uniform", {"method": "fixed", "weights": "uniform"})
PROPORTIONAL = Arm("proportional", {"method": "fixed", "weights": "proportional"})


def run(
    base: Config,
    arms: Sequence[Arm],
    *,
    seeds: int,
    out: Path,
    workers: int | None,
    console: Console,
    engine: Engine = LOCAL,
) -> list[Row]:
    """Do the runs that are not done yet, and write the tables.

    Args:
        base: the settings that all arms share.
        arms: what to compare.
        seeds: how many, from 0.
        out: the folder.
        workers: how many runs at a time; ``None`` for one per core.
        console: for the progress.
        engine: where they are done.

    Returns:
        The rows of the table of runs.

    Raises:
        ValueError: there is no seed.
    """
    if seeds < 1:
        raise ValueError(f"a comparison needs at least 1 seed, got {seeds}")
    # Seed by seed, so that a comparison that was stopped has something to compare.
    order = [(arm, seed) for seed in range(seeds) for arm in arms]
    planned = [Planned(arm.config(base, seed), folder(out, arm.name, seed)) for arm, seed in order]
    with only_one(out):
        environment.write(out)
        concurrent.run_all(
            planned, workers=workers, unfinished=out / "unfinished", console=console, engine=engine
        )
        by_arm = [(arm, seed) for arm in arms for seed in range(seeds)]
        rows = [_row(arm.name, seed, folder(out, arm.name, seed)) for arm, seed in by_arm]
        curves = [row for arm, seed in by_arm for row in _curve(arm.name, seed, folder(out, arm.name, seed))]
        weights = [
            row for arm, seed in by_arm for row in _weights(arm.name, seed, folder(out, arm.name, seed))
        ]
        tables.write(out / CURVES, curves)
        tables.write(out / WEIGHTS, weights)
        tables.write(out / RUNS, rows)
    return rows


def folder(out: Path, arm: str, seed: int) -> Path:
    """The directory of a run.

    Args:
        out: the folder of the comparison.
        arm: its name.
        seed: of the run.

    Returns:
        Where it is, or will be.
    """
    return out / "runs" / f"{arm}-{seed}"


def _row(arm: str, seed: int, run: Path) -> Row:
    last = list(metrics.read(run, "evaluation"))[-1]
    seconds = list(metrics.read(run, "step"))[-1]["seconds"]
    losses = {f"{name}_loss": value for name, value in last["losses"].items()}
    return {"arm": arm, "seed": seed, "steps": last["step"], **losses, "seconds": seconds}


def _curve(arm: str, seed: int, run: Path) -> list[Row]:
    return [
        {"arm": arm, "seed": seed, "step": line["step"], "validation_loss": line["losses"]["validation"]}
        for line in metrics.read(run, "evaluation")
    ]


def _weights(arm: str, seed: int, run: Path) -> list[Row]:
    return [
        {"arm": arm, "seed": seed, "step": point["step"], "domain": name, "weight": weight}
        for point in mixture.read(run)["history"]
        for name, weight in point["weights"].items()
    ]
