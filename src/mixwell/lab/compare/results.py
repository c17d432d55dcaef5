"""The tables of a comparison: losses, costs and weights of every run.

Next to a loss are the ``steps`` that the run trained, the ``budget`` that all methods have, and the
``other_steps`` that paid for validation gradients, probes and trials; all in training steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mixwell.lab import tables
from mixwell.lab.compare.variants import Variant
from mixwell.lab.tables import Row
from mixwell.training import metrics, mixture_file, stages
from mixwell.training.config import Config

RUNS, FAILURES, CURVES, WEIGHTS = "compare.csv", "failures.csv", "curves.csv", "weights.csv"


@final
@dataclass(frozen=True)
class ComparedRun:
    """A run of a variant with one seed.

    Args:
        config: the variant's settings with this seed.
        budget: allowed compute in training steps; ``None`` for no limit.
    """

    variant: Variant
    seed: int
    config: Config
    folder: Path
    budget: float | None


def write_tables(out: Path, runs: Sequence[ComparedRun], failures: Sequence[Row]) -> list[Row]:
    """Write the tables and return the rows of :data:`RUNS`.

    Args:
        runs: finished runs.
        failures: rows with ``variant``, ``seed`` and ``reason``, of variants that could not be run.
    """
    rows = [_row(run) for run in runs]
    written = {
        FAILURES: failures,
        CURVES: [row for run in runs for row in _curve(run)],
        WEIGHTS: [row for run in runs for row in _weights(run)],
        RUNS: rows,
    }
    for name, table in written.items():
        if table:
            tables.write(out / name, table)
        else:
            (out / name).unlink(missing_ok=True)
    return rows


def _row(run: ComparedRun) -> Row:
    variant, found = run.variant, mixture_file.read_mixture(run.folder)
    last = list(metrics.read_metrics(run.folder, "evaluation"))[-1]
    trials = [one.parent for one in (run.folder / stages.FOLDER).glob(f"*/{mixture_file.FILE}")]
    everything = [run.folder, *trials]
    compute = float(found["rows"]["computed"]) / run.config.batch.rows
    return {
        "variant": variant.name,
        "entry": variant.entry,
        "method": variant.method.name,
        "kind": variant.kind,
        "horizon": "" if variant.horizon is None else variant.horizon,
        "seed": run.seed,
        **{f"{name}_loss": value for name, value in last["losses"].items()},
        "steps": last["step"],
        "budget": "" if run.budget is None else run.budget,
        "other_steps": round(compute - last["step"], 3),
        "compute": round(compute, 3),
        "seconds": round(sum(_seconds(one) for one in everything), 2),
        "memory": max(int(mixture_file.read_mixture(one)["memory"]) for one in everything),
    }


def _seconds(folder: Path) -> float:
    return float(list(metrics.read_metrics(folder, "step"))[-1]["seconds"])


def _curve(run: ComparedRun) -> list[Row]:
    lines = list(metrics.read_metrics(run.folder, "evaluation"))
    end = float(mixture_file.read_mixture(run.folder)["rows"]["computed"]) / run.config.batch.rows
    before = stages.computed(run.folder) / run.config.batch.rows
    if run.variant.kind != "online":  # weights stay fixed, so the run itself computes its steps and no more
        before = end - lines[-1]["step"]
    per_step = (end - before) / lines[-1]["step"]
    return [
        {
            "variant": run.variant.name,
            "seed": run.seed,
            "step": line["step"],
            "compute": round(before + per_step * line["step"], 3),
            "validation_loss": line["losses"]["validation"],
        }
        for line in lines
        if "validation" in line["losses"]
    ]


def _weights(run: ComparedRun) -> list[Row]:
    found = mixture_file.read_mixture(run.folder)
    first = found["history"][0]["weights"]
    return [
        {
            "variant": run.variant.name,
            "seed": run.seed,
            "domain": name,
            "initial": first[name],
            "average": found["weights"]["average"][name],
            "last": found["weights"]["last"][name],
        }
        for name in found["domains"]
    ]
