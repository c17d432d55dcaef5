"""Who is ahead in a comparison of methods, and what a few seeds can say about it.

Arms are compared seed by seed, since a seed means the same model and data in all of them: differences then vary
less than losses do. What is within the noise is said to be so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import final

from mixwell.lab.intervals import Interval, interval
from mixwell.lab.tables import Row, Value

LOSSES = (("test_loss", "test loss"), ("validation_loss", "validation loss"))
UNIFORM, PROPORTIONAL = "uniform", "proportional"
BEST, NOISE, WORSE, NOT_FINITE = "best", "within its noise", "worse", "not finite"


@final
@dataclass(frozen=True)
class Standing:
    """An arm among the others.

    Args:
        arm: its name.
        entry: its name without a horizon: that of a method, or of a variant.
        method: of the field.
        kind: online, offline or static.
        horizon: T, where weights are learned.
        losses: at the end of the last run, by seed.
        steps: of the last run; this and the next ones are means over the seeds.
        compute: all that was computed, in training steps.
        budget: the compute that was allowed.
        seconds: all of them.
        memory: bytes held beside plain training.
        rank: by the mean loss, from 1; arms with the same mean have the same.
        to_uniform: the loss less that of uniform weights, paired by seed; ``None`` where there is no such arm.
        to_best: the loss less that of the first arm, paired by seed.
        weights: the average of each domain, mean over the seeds.
    """

    arm: str
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
        """The mean loss; NaN where one is not finite."""
        values = list(self.losses.values())
        return fmean(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds, that of a sample; NaN where there is none."""
        values = list(self.losses.values())
        return stdev(values) if len(values) > 1 and math.isfinite(self.mean) else math.nan

    @property
    def beside_best(self) -> str:
        """How it stands to the first arm; empty where too few seeds could tell."""
        if not math.isfinite(self.mean):
            return NOT_FINITE
        if self.to_best is None:
            return BEST
        if math.isnan(self.to_best.low):
            return ""
        return NOISE if 0.0 in self.to_best else WORSE


@final
@dataclass(frozen=True)
class Pair:
    """A method with a short and with a long horizon.

    Args:
        entry: a method, or a variant of one.
        arms: from the shortest horizon to the longest.
        change: the loss with the longest less that with the shortest, paired by seed.
    """

    entry: str
    arms: Sequence[Standing]
    change: Interval

    @property
    def longer_is_better(self) -> bool:
        """Whether the mean loss is less with the longest horizon; a loss that is not finite is the greatest."""
        return _order(self.arms[-1]) < _order(self.arms[0])


def loss_column(rows: Sequence[Row]) -> tuple[str, str]:
    """The loss that arms are compared by: that of the test set where there is one.

    Args:
        rows: of the table of runs.

    Returns:
        The column, and how it is called.

    Raises:
        ValueError: there is no loss.
    """
    for column, label in LOSSES:
        if any(row.get(column, "") != "" for row in rows):
            return column, label
    raise ValueError(
        f"a comparison needs a column {' or '.join(column for column, _ in LOSSES)} with numbers, got "
        f"{list(rows[0]) if rows else 'no rows'}; give the config a test or validation set"
    )


def standings(rows: Sequence[Row], weights: Sequence[Row] = ()) -> list[Standing]:
    """The arms by their mean loss, the least first; those whose loss is not finite are the last.

    Args:
        rows: of the table of runs.
        weights: of the table of weights.

    Returns:
        One for each arm.
    """
    column, _ = loss_column(rows)
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        by_arm.setdefault(str(row["arm"]), []).append(row)
    found = sorted((_standing(own, column) for own in by_arm.values()), key=_order)
    averages = average_weights(weights)
    base = of_method(found, UNIFORM)
    order = [_order(one) for one in found]
    return [
        replace(
            one,
            rank=1 + order.index(_order(one)),
            to_uniform=paired(one, base) if base is not None and one is not base else None,
            to_best=paired(one, found[0]) if place else None,
            weights=averages.get(one.arm, {}),
        )
        for place, one in enumerate(found)
    ]


def paired(one: Standing, other: Standing) -> Interval:
    """The difference of two arms over the seeds that both have.

    Args:
        one: an arm.
        other: what is subtracted.

    Returns:
        The mean and its 95% interval; NaN where a loss is not finite.
    """
    differences = [loss - other.losses[seed] for seed, loss in one.losses.items() if seed in other.losses]
    if not all(map(math.isfinite, differences)):
        return Interval(math.nan, math.nan, math.nan, len(differences))
    return interval(differences)


def average_weights(weights: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The average weight of each domain in each arm.

    Args:
        weights: of the table of weights.

    Returns:
        Means over the seeds, by arm and domain.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in weights:
        domains = found.setdefault(str(row["arm"]), {})
        domains.setdefault(str(row["domain"]), []).append(number(row["average"]))
    return {arm: {name: fmean(v) for name, v in domains.items()} for arm, domains in found.items()}


def pairs(found: Sequence[Standing]) -> list[Pair]:
    """The methods that were run with several horizons, that which gains most by the longest first.

    Args:
        found: the arms.

    Returns:
        One for each method and for each variant of one.
    """
    by_entry: dict[str, list[Standing]] = {}
    for one in found:
        if one.horizon is not None:
            by_entry.setdefault(one.entry, []).append(one)
    made: list[Pair] = []
    for entry, own in by_entry.items():
        arms = sorted(own, key=lambda one: one.horizon or 0)
        if arms[0].horizon != arms[-1].horizon:
            made.append(Pair(entry, arms, paired(arms[-1], arms[0])))
    return sorted(made, key=lambda pair: pair.change.mean if math.isfinite(pair.change.mean) else math.inf)


def of_method(found: Sequence[Standing], method: str) -> Standing | None:
    """The first arm of a method.

    Args:
        found: the arms.
        method: its name.

    Returns:
        The arm; ``None`` where there is none.
    """
    return next((one for one in found if one.method == method), None)


def number(value: Value) -> float:
    """A cell of a table as a number.

    Args:
        value: of the cell.

    Returns:
        The number; NaN where the cell is empty.
    """
    return math.nan if value == "" else float(value)


def _standing(own: Sequence[Row], column: str) -> Standing:
    first = own[0]

    def mean(name: str) -> float:
        return fmean(number(row[name]) for row in own)

    return Standing(
        str(first["arm"]),
        str(first["entry"]),
        str(first["method"]),
        str(first["kind"]),
        None if first["horizon"] == "" else int(first["horizon"]),
        {int(row["seed"]): number(row.get(column, "")) for row in own},
        mean("steps"),
        mean("compute"),
        mean("budget"),
        mean("seconds"),
        mean("memory"),
    )


def _order(one: Standing) -> float:
    return one.mean if math.isfinite(one.mean) else math.inf
