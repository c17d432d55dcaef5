"""Curves of the MNIST experiment: final loss, accuracy and weights against the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.lab.mnist.experiment import DOMAINS, ROTATED, MnistSettings
from mixwell.lab.tables import Row, Value, column
from mixwell.reference.theory import stochastic_horizon

Array = NDArray[np.float64]
NEAR = 1.05
"""A loss within this factor of the lowest is near it."""


@final
@dataclass(frozen=True)
class Curve:
    """The runs with the same settings, by horizon.

    Args:
        setting: the common settings.
        label: network width, batch size, and the settings in which it differs from the other curves.
        horizons: ascending.
        rows: the runs of each horizon, one per seed.
    """

    setting: dict[str, Value]
    label: str
    horizons: list[int]
    rows: list[list[Row]]

    @property
    def budget(self) -> int:
        """Training steps N."""
        return int(self.setting["budget"])

    @property
    def theory(self) -> int:
        """The theory's horizon, ``ceil(sqrt(N log N))``."""
        return stochastic_horizon(self.budget)

    @property
    def seeds(self) -> int:
        """The smallest number of runs of a horizon."""
        return min(len(rows) for rows in self.rows)

    @property
    def uneven(self) -> bool:
        """Whether some horizons have more seeds than others, as in an unfinished sweep."""
        return max(len(rows) for rows in self.rows) > self.seeds

    def mean(self, name: str) -> Array:
        """Return the mean of a column for each horizon."""
        return np.array([float(np.mean(column(rows, name))) for rows in self.rows])

    def deviation(self, name: str) -> Array:
        """Return the standard deviation over the seeds for each horizon; zero for one seed."""
        return np.array(
            [float(np.std(column(rows, name), ddof=1)) if len(rows) > 1 else 0.0 for rows in self.rows]
        )

    @property
    def best(self) -> int:
        """The index of the horizon with the lowest mean validation loss."""
        return int(self.mean("validation_loss").argmin())


def curves_of(runs: Sequence[Row]) -> list[Curve]:
    """Return the curves in the rows of ``runs.csv``, sorted by budget, width and batch size.

    Raises:
        ValueError: There are no runs.
    """
    if not runs:
        raise ValueError("there are no finished runs to show")
    groups: dict[tuple[Value, ...], list[Row]] = {}
    names = [field.name for field in fields(MnistSettings) if field.name not in ("horizon", "seed")]
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
    parts = [f"{name.replace('_', ' ')} {setting[name]:g}" for name in others]
    return ", ".join([f"c = {setting['channels']}", f"batch {setting['batch_size']}", *parts])


def curve_table(curve: Curve) -> tuple[list[str], list[list[str]]]:
    """Return headings, and the means over the seeds as a row of texts for each horizon; * marks the theory's T."""
    columns = {
        "loss": "validation_loss",
        "accuracy": "validation_accuracy",
        "test loss": "test_loss",
        **{f"w {domain}": f"last_{domain}" for domain in DOMAINS},
        "w₂ average": f"average_{ROTATED}",
    }
    means = [curve.mean(name) for name in columns.values()]
    deviation, seconds = curve.deviation("validation_loss"), curve.mean("seconds")
    rows: list[list[str]] = []
    for index, horizon in enumerate(curve.horizons):
        cells = [f"{mean[index]:.3f}" for mean in means]
        if curve.seeds > 1:
            cells[0] += f" ± {deviation[index]:.3f}"
        mark = " *" if horizon == curve.theory else ""
        rows.append([f"{horizon}{mark}", *cells, f"{seconds[index]:.0f}"])
    return ["T", *columns, "seconds"], rows


def verdict(curve: Curve) -> str:
    """Return the horizon with the lowest loss, and how T = 1, the theory's T and T = N compare with it."""
    loss, best = curve.mean("validation_loss"), curve.best
    seeds = f"{curve.seeds}{'+' if curve.uneven else ''} seed{'s' if curve.seeds > 1 else ''}"
    plus_minus = f" ± {curve.deviation('validation_loss')[best]:.3f}" if curve.seeds > 1 else ""
    others = {1: "", curve.theory: " (theory)", curve.budget: " (one round)"}
    ratios = [
        f"{loss[index] / loss[best]:.2f} times at T = {horizon}{others[horizon]}"
        for index, horizon in enumerate(curve.horizons)
        if horizon in others and index != best
    ]
    return (
        f"N = {curve.budget}, {curve.label}, {seeds}: the lowest validation loss is {loss[best]:.3f}{plus_minus} "
        f"at T = {curve.horizons[best]}{'; ' if ratios else ''}{', '.join(ratios)}."
    )
