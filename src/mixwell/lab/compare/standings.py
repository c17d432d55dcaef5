"""Rank the methods of a comparison, with the uncertainty that a few seeds leave.

Methods are compared seed by seed, since a seed means the same model and data for all of them: paired differences
vary less than losses do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import final

from mixwell.lab.tables import Row, Value
from mixwell.utils.intervals import Interval, interval

LOSSES = (("test_loss", "test loss"), ("validation_loss", "validation loss"))
UNIFORM, PROPORTIONAL = "uniform", "proportional"
BEST, WITHIN_NOISE, WORSE, NOT_FINITE = "best", "within noise", "worse", "not finite"


@final
@dataclass(frozen=True)
class Standing:
    """The place of one entry (a method with its settings) in a comparison.

    Args:
        name: the entry's name, with its horizon if several were run.
        entry: its name without the horizon.
        kind: online, offline or static.
        horizon: T, if weights are learned in rounds.
        losses: loss at the end of the last run, by seed.
        steps: training steps of the last run; this and the following are means over the seeds.
        compute: everything that was computed, in training steps.
        budget: allowed compute, in training steps.
        memory: bytes in addition to plain training.
        rank: rank by the mean loss, from 1; equal means share it.
        to_uniform: loss minus that of uniform weights, paired by seed; ``None`` if there is no such entry.
        to_best: loss minus that of the best entry, paired by seed.
        weights: average weight of each domain, mean over the seeds.
    """

    name: str
    entry: str
    method: str
    kind: str
    horizon: int | None
    losses: Mapping[int, float]
    steps: float
    compute: float
    budget: float
    seconds: float
    memory: float
    rank: int = 0
    to_uniform: Interval | None = None
    to_best: Interval | None = None
    weights: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def mean(self) -> float:
        """The mean loss; NaN if one is not finite."""
        values = list(self.losses.values())
        return fmean(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def deviation(self) -> float:
        """The sample standard deviation over the seeds; NaN for one seed."""
        values = list(self.losses.values())
        return stdev(values) if len(values) > 1 and math.isfinite(self.mean) else math.nan

    @property
    def status(self) -> str:
        """How it compares with the best entry; empty with too few seeds to say."""
        if not math.isfinite(self.mean):
            return NOT_FINITE
        if self.to_best is None:
            return BEST
        if math.isnan(self.to_best.low):
            return ""
        return WITHIN_NOISE if 0.0 in self.to_best else WORSE


@final
@dataclass(frozen=True)
class HorizonEffect:
    """The effect of the horizon on one method.

    Args:
        runs: from the shortest horizon to the longest.
        change: loss with the longest horizon minus that with the shortest, paired by seed.
    """

    entry: str
    runs: Sequence[Standing]
    change: Interval


def loss_column(rows: Sequence[Row]) -> tuple[str, str]:
    """Return column and label of the loss to compare by: the test loss if there is one.

    Raises:
        ValueError: There is no loss.
    """
    for column, label in LOSSES:
        if any(row.get(column, "") != "" for row in rows):
            return column, label
    raise ValueError(
        f"a comparison needs a column {' or '.join(column for column, _ in LOSSES)} with numbers, got "
        f"{list(rows[0]) if rows else 'no rows'}; give the config a test or validation set"
    )


def standings(rows: Sequence[Row], weights: Sequence[Row] = ()) -> list[Standing]:
    """Return the entries in ascending order of their mean loss; those that are not finite come last.

    Args:
        rows: rows of ``compare.csv``.
        weights: rows of ``weights.csv``.
    """
    column, _ = loss_column(rows)
    if "variant" not in rows[0]:
        raise ValueError(
            f"a comparison needs a column variant, got {list(rows[0])}; older versions called it "
            "arm: rename it, or call `mixwell compare` again, which rewrites the tables"
        )
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(str(row["variant"]), []).append(row)
    found = sorted((_standing(own, column) for own in by_name.values()), key=_order)
    averages = _average_weights(weights)
    uniform = of_method(found, UNIFORM)
    order = [_order(one) for one in found]
    return [
        replace(
            one,
            rank=1 + order.index(_order(one)),
            to_uniform=paired(one, uniform) if uniform is not None and one is not uniform else None,
            to_best=paired(one, found[0]) if place else None,
            weights=averages.get(one.name, {}),
        )
        for place, one in enumerate(found)
    ]


def paired(one: Standing, other: Standing) -> Interval:
    """Return the mean of ``one - other`` over common seeds with its 95% interval; NaN if not finite."""
    differences = [loss - other.losses[seed] for seed, loss in one.losses.items() if seed in other.losses]
    if not all(map(math.isfinite, differences)):
        return Interval(math.nan, math.nan, math.nan, len(differences))
    return interval(differences)


def horizon_effects(found: Sequence[Standing]) -> list[HorizonEffect]:
    """Return the entries that were run with several horizons, in ascending order of the change in loss."""
    by_entry: dict[str, list[Standing]] = {}
    for one in found:
        if one.horizon is not None:
            by_entry.setdefault(one.entry, []).append(one)
    effects: list[HorizonEffect] = []
    for entry, own in by_entry.items():
        runs = sorted(own, key=lambda one: one.horizon or 0)
        if runs[0].horizon != runs[-1].horizon:
            effects.append(HorizonEffect(entry, runs, paired(runs[-1], runs[0])))
    return sorted(effects, key=lambda one: one.change.mean if math.isfinite(one.change.mean) else math.inf)


def of_method(found: Sequence[Standing], method: str) -> Standing | None:
    """Return the best entry of a method, if there is one."""
    return next((one for one in found if one.method == method), None)


def as_number(value: Value) -> float:
    """Return a cell of a table as a number; NaN if it is empty."""
    return math.nan if value == "" else float(value)


def _average_weights(weights: Sequence[Row]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    for row in weights:
        domains = found.setdefault(str(row["variant"]), {})
        domains.setdefault(str(row["domain"]), []).append(as_number(row["average"]))
    return {name: {domain: fmean(v) for domain, v in own.items()} for name, own in found.items()}


def _standing(own: Sequence[Row], column: str) -> Standing:
    first = own[0]

    def mean(name: str) -> float:
        return fmean(as_number(row[name]) for row in own)

    return Standing(
        str(first["variant"]),
        str(first["entry"]),
        str(first["method"]),
        str(first["kind"]),
        None if first["horizon"] == "" else int(first["horizon"]),
        {int(row["seed"]): as_number(row.get(column, "")) for row in own},
        mean("steps"),
        mean("compute"),
        mean("budget"),
        mean("seconds"),
        mean("memory"),
    )


def _order(one: Standing) -> float:
    return one.mean if math.isfinite(one.mean) else math.inf
