"""What a sweep of the MNIST experiment says: final loss, accuracy and weights against the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.lab.tables import Row, Value, column
from mixwell.reference.theory import stochastic_horizon

Array = NDArray[np.float64]
NEAR = 1.05
"""A loss within this factor of the least is near it."""
_RUN_ITSELF = ("run", "horizon", "seed", "seconds")
_RESULTS = ("validation_", "test_", "last_", "average_")


@final
@dataclass(frozen=True)
class Curve:
    """The runs of one setting, by horizon.

    Args:
        setting: what all of them share.
        label: what tells them from the other curves; width and batch in any case.
        horizons: ascending.
        rows: the runs of each horizon, one for each seed.
    """

    setting: dict[str, Value]
    label: str
    horizons: list[int]
    rows: list[list[Row]]

    @property
    def budget(self) -> int:
        """N."""
        return int(self.setting["budget"])

    @property
    def theory(self) -> int:
        """The theory's horizon, ``ceil(sqrt(N log N))``."""
        return stochastic_horizon(self.budget)

    @property
    def seeds(self) -> int:
        """The least number of runs of a horizon."""
        return min(len(rows) for rows in self.rows)

    @property
    def uneven(self) -> bool:
        """Whether some horizons have more seeds than others, as in an unfinished sweep."""
        return max(len(rows) for rows in self.rows) > self.seeds

    def mean(self, name: str) -> Array:
        """Of a column, for each horizon."""
        return np.array([float(np.mean(column(rows, name))) for rows in self.rows])

    def spread(self, name: str) -> Array:
        """The standard deviation over the seeds; zero for one seed."""
        return np.array(
            [float(np.std(column(rows, name), ddof=1)) if len(rows) > 1 else 0.0 for rows in self.rows]
        )

    def best(self, name: str = "validation_loss") -> int:
        """The index of the horizon with the least mean."""
        return int(self.mean(name).argmin())

    def at(self, horizon: int) -> int | None:
        """The index of a horizon, where there is one."""
        return self.horizons.index(horizon) if horizon in self.horizons else None


def curves_of(runs: Sequence[Row]) -> list[Curve]:
    """The curves in a table of runs.

    Args:
        runs: the rows of ``runs.csv``, of one folder or several.

    Returns:
        One for each setting, in the order of budget and batch size.

    Raises:
        ValueError: there are no runs.
    """
    if not runs:
        raise ValueError("there are no finished runs to show")
    groups: dict[tuple[Value, ...], list[Row]] = {}
    names = [n for n in runs[0] if n not in _RUN_ITSELF and not n.startswith(_RESULTS)]
    for row in runs:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    differing = [name for index, name in enumerate(names) if len({key[index] for key in groups}) > 1]
    curves: list[Curve] = []
    for key, rows in groups.items():
        setting = dict(zip(names, key, strict=True))
        horizons = sorted({int(row["horizon"]) for row in rows})
        by_horizon = [[row for row in rows if row["horizon"] == t] for t in horizons]
        curves.append(Curve(setting, _label(setting, differing), horizons, by_horizon))
    return sorted(curves, key=lambda c: [c.setting[n] for n in ("budget", "channels", "batch_size")])


def _label(setting: dict[str, Value], differing: Sequence[str]) -> str:
    others = [n for n in differing if n not in ("budget", "channels", "batch_size")]
    told = [f"{name.replace('_', ' ')} {setting[name]:g}" for name in others]
    return ", ".join([f"c = {setting['channels']}", f"batch {setting['batch_size']}", *told])


def findings(curve: Curve) -> list[str]:
    """What a curve says about the horizon, in sentences, each from its numbers.

    Args:
        curve: of one setting.

    Returns:
        The sentences.
    """
    loss, spread, name = curve.mean("validation_loss"), curve.spread("validation_loss"), "validation loss"
    best = curve.best()

    def told(index: int) -> str:
        deviation = f" ± {spread[index]:.3f}" if curve.seeds > 1 else ""
        return f"T = {curve.horizons[index]}: {loss[index]:.3f}{deviation}"

    seeds = f"{curve.seeds} seeds" if curve.seeds > 1 else "one seed"
    seeds += " or more" if curve.uneven else ""
    lines = [f"N = {curve.budget}, {curve.label}, {seeds}: the least {name} is at {told(best)}."]
    if best in (0, len(loss) - 1):
        lines.append("The best horizon is at an end of the grid, so there is no valley to speak of.")
    compared = [(1, "updating at every step"), (curve.theory, "the theory's"), (curve.budget, "one round")]
    for horizon, meaning in compared:
        index = curve.at(horizon)
        if index is not None and index != best:
            more = loss[index] / loss[best]
            lines.append(f"{told(index)} ({meaning}), {more:.2f} times the least.")
    near = [str(t) for t, value in zip(curve.horizons, loss, strict=True) if value <= NEAR * loss[best]]
    if len(near) > 1:
        lines.append(f"Within {NEAR - 1:.0%} of the least: T = {', '.join(near)}.")
    return lines
