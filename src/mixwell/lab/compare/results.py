"""The tables of a comparison: what every run reached, what it cost, which weights it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mixwell.lab import tables
from mixwell.lab.tables import Row
from mixwell.training import metrics, mixture, stages
from mixwell.training.config import Config

RUNS, FAILURES, CURVES, WEIGHTS = "compare.csv", "failures.csv", "curves.csv", "weights.csv"


@final
@dataclass(frozen=True)
class Entry:
    """A run of a contestant.

    Args:
        arm: the contestant's name.
        entry: the same without a horizon.
        method: its method's name.
        kind: of the method.
        horizon: T, if there is one.
        seed: of the run.
        config: its settings.
        folder: its directory.
        budget: what it may compute, in training steps; ``None`` where that is not limited.
    """

    arm: str
    entry: str
    method: str
    kind: str
    horizon: int | None
    seed: int
    config: Config
    folder: Path
    budget: float | None


def write(out: Path, entries: Sequence[Entry], failures: Sequence[Row]) -> list[Row]:
    """Write the tables.

    Args:
        out: the folder.
        entries: the runs that are finished.
        failures: arms that could not be run, with ``arm``, ``seed`` and ``reason``.

    Returns:
        The rows of the table of runs.
    """
    rows = [_row(entry) for entry in entries]
    written = {
        FAILURES: failures,
        CURVES: [row for entry in entries for row in _curve(entry)],
        WEIGHTS: [row for entry in entries for row in _weights(entry)],
        RUNS: rows,
    }
    for name, table in written.items():
        if table:
            tables.write(out / name, table)
        else:
            (out / name).unlink(missing_ok=True)
    return rows


def _row(entry: Entry) -> Row:
    found = mixture.read(entry.folder)
    last = list(metrics.read(entry.folder, "evaluation"))[-1]
    trials = [one.parent for one in (entry.folder / stages.FOLDER).glob(f"*/{mixture.FILE}")]
    everything = [entry.folder, *trials]
    return {
        "arm": entry.arm,
        "entry": entry.entry,
        "method": entry.method,
        "kind": entry.kind,
        "horizon": "" if entry.horizon is None else entry.horizon,
        "seed": entry.seed,
        "steps": last["step"],
        "compute": round(float(found["rows"]["computed"]) / entry.config.batch.rows, 3),
        "budget": "" if entry.budget is None else entry.budget,
        **{f"{name}_loss": value for name, value in last["losses"].items()},
        "seconds": round(sum(_seconds(one) for one in everything), 2),
        "memory": max(int(mixture.read(one)["memory"]) for one in everything),
    }


def _seconds(folder: Path) -> float:
    return float(list(metrics.read(folder, "step"))[-1]["seconds"])


def _curve(entry: Entry) -> list[Row]:
    lines = list(metrics.read(entry.folder, "evaluation"))
    end = float(mixture.read(entry.folder)["rows"]["computed"]) / entry.config.batch.rows
    # Where weights are kept, the run itself computes its steps and no more.
    before = stages.computed(entry.folder) / entry.config.batch.rows
    if entry.kind != "online":
        before = end - lines[-1]["step"]
    per_step = (end - before) / lines[-1]["step"]
    return [
        {
            "arm": entry.arm,
            "seed": entry.seed,
            "step": line["step"],
            "compute": round(before + per_step * line["step"], 3),
            "validation_loss": line["losses"]["validation"],
        }
        for line in lines
        if "validation" in line["losses"]
    ]


def _weights(entry: Entry) -> list[Row]:
    found = mixture.read(entry.folder)
    first = found["history"][0]["weights"]
    return [
        {
            "arm": entry.arm,
            "seed": entry.seed,
            "domain": name,
            "initial": first[name],
            "average": found["weights"]["average"][name],
            "last": found["weights"]["last"][name],
        }
        for name in found["domains"]
    ]
