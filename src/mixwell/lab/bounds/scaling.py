"""The best horizon for each budget, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from mixwell.lab.bounds.cells import KINDS, full_rate, shortest
from mixwell.lab.bounds.problems import Array
from mixwell.lab.tables import Row, column
from mixwell.reference import theory
from mixwell.utils.intervals import Interval, interval


@final
@dataclass(frozen=True)
class BestHorizon:
    """The best horizon of one problem and budget.

    Args:
        measured: T with the smallest measured gap, interpolated by a parabola in the logarithms.
        gap: the gap at the best horizon of the grid.
        theory: T that minimizes the theorem's bound; NaN where the budget is too short for the theorem, or would
            be a single round.
        gap_at_choice: the measured gap at the grid's horizon nearest to ``choice``.
        choice: the paper's choice.
        shortest: the shortest horizon to which the theorem applies.
    """

    seed: int
    budget: int
    measured: float
    gap: float
    theory: float
    gap_at_choice: float
    choice: int
    shortest: int


Best = dict[tuple[str, bool], list[BestHorizon]]
"""By kind of problem, and whether gradients are noisy."""


@final
@dataclass(frozen=True)
class Fit:
    """The growth of the best horizon over all problems of a kind.

    Without noise ``T = a + b log N``; with noise ``log T = a + b log(N log N)``. Each problem has its own
    slope b; the intervals are Student's over the problems.

    Args:
        slope: b, the exponent with noise.
        late: b without the first decade of budgets, where few horizons are long enough for the theorem.
        theory: b of the horizons that minimize the bound.
        intercept: the mean of a.
    """

    kind: str
    noisy: bool
    slope: Interval
    late: Interval
    theory: float
    intercept: float

    def predict(self, budget: Array) -> Array:
        """Return the fitted horizon for each budget."""
        line = self.intercept + self.slope.mean * abscissa(budget, noisy=self.noisy)
        return np.exp(line) if self.noisy else line


def abscissa(budget: Array, *, noisy: bool) -> Array:
    """Return ``log N``, or with noise ``log(N log N)``."""
    return np.log(budget * np.log(budget)) if noisy else np.log(budget)


def best_horizons(rows: Sequence[Row]) -> list[BestHorizon]:
    """Return the best horizon of every problem and budget, sorted.

    Args:
        rows: scaling rows of one kind of problems, with or without noise.
    """
    found: list[BestHorizon] = []
    for seed, budget in sorted({(int(r["seed"]), int(r["budget"])) for r in rows}):
        own = sorted(
            (r for r in rows if r["seed"] == seed and r["budget"] == budget), key=lambda r: r["horizon"]
        )
        horizons, gaps = np.array(column(own, "horizon")), np.array(column(own, "gap"))
        noisy = bool(own[0]["noisy"])
        constants = KINDS[str(own[0]["kind"])](seed).constants(str(own[0]["curvature"]), noisy=noisy)
        first = shortest(noisy, constants)
        if noisy:
            choice = theory.stochastic_horizon(budget)
        else:
            rate, mu = full_rate(constants), constants.strong_convexity
            choice = theory.deterministic_horizon(budget, learning_rate=rate, strong_convexity=mu)
        near = int(np.abs(np.log(horizons / min(choice, budget))).argmin())
        found.append(
            BestHorizon(
                seed=seed,
                budget=budget,
                measured=lowest(horizons, gaps),
                gap=float(gaps.min()),
                theory=_least_bound(constants, budget, noisy=noisy) if first <= budget else math.nan,
                gap_at_choice=float(gaps[near]),
                choice=choice,
                shortest=first,
            )
        )
    return found


def growth_of(rows: Sequence[Row]) -> tuple[Best, list[Fit]]:
    """Return the best horizons by kind of problem and noise, and a fit for each."""
    scaling = [row for row in rows if row["purpose"] == "scaling"]
    best: Best = {}
    for kind, noisy in dict.fromkeys((str(row["kind"]), int(row["noisy"])) for row in scaling):
        own = [row for row in scaling if (row["kind"], row["noisy"]) == (kind, noisy)]
        best[kind, bool(noisy)] = best_horizons(own)
    return best, [fit(kind, found, noisy=noisy) for (kind, noisy), found in best.items()]


def lowest(horizons: Array, gaps: Array) -> float:
    """Return the vertex of the parabola through the smallest gap and its neighbors, in logarithms.

    Args:
        horizons: ascending.
        gaps: positive.

    Example:
        >>> t = np.array([1.0, 10.0, 100.0])
        >>> round(lowest(t, np.exp((np.log(t) - np.log(20)) ** 2)), 6)
        20.0
    """
    best = int(gaps.argmin())
    if best in (0, len(gaps) - 1):
        return float(horizons[best])
    around = slice(best - 1, best + 2)
    curve = np.polyfit(np.log(horizons[around]), np.log(np.maximum(gaps[around], 1e-300)), 2)
    return math.exp(-curve[1] / (2 * curve[0])) if curve[0] > 0 else float(horizons[best])


def fit(kind: str, best: Sequence[BestHorizon], *, noisy: bool) -> Fit:
    """Fit the growth of the best horizon over several problems and budgets."""
    later = 10 * min(b.budget for b in best)
    lines = _lines(best, lambda b: b.measured, noisy)
    late = _lines([b for b in best if b.budget >= later], lambda b: b.measured, noisy)
    ideal = _lines([b for b in best if not math.isnan(b.theory)], lambda b: b.theory, noisy)
    return Fit(
        kind,
        noisy,
        slope=interval([slope for slope, _ in lines]),
        late=interval([slope for slope, _ in late]),
        theory=interval([slope for slope, _ in ideal]).mean,
        intercept=interval([intercept for _, intercept in lines]).mean,
    )


def _least_bound(constants: theory.Constants, budget: int, *, noisy: bool) -> float:
    if noisy:
        found = theory.best_stochastic_horizon(constants, budget=budget)
    else:
        found = theory.best_deterministic_horizon(
            constants, budget=budget, learning_rate=full_rate(constants)
        )
    return float(found) if found < budget else math.nan


def _lines(
    best: Sequence[BestHorizon], horizon: Callable[[BestHorizon], float], noisy: bool
) -> list[tuple[float, float]]:
    """Return slope and intercept of each problem with at least two budgets."""
    found: list[tuple[float, float]] = []
    for seed in sorted({b.seed for b in best}):
        own = [b for b in best if b.seed == seed]
        if len(own) < 2:
            continue
        x = abscissa(np.array([float(b.budget) for b in own]), noisy=noisy)
        y = np.array([horizon(b) for b in own])
        slope, intercept = np.polyfit(x, np.log(y) if noisy else y, 1)
        found.append((float(slope), float(intercept)))
    return found


def growth_table(best: Best, fits: Sequence[Fit]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row of texts for each fit.

    The paper's choice of T is compared with the best horizon: the ratio of the two and of their gaps (medians over
    the problems with the largest budget), and how many best horizons are too short for the theorem.
    """
    rows: list[list[str]] = []
    for fitted in fits:
        found = best[fitted.kind, fitted.noisy]
        last = max(b.budget for b in found)
        own = [b for b in found if b.budget == last]
        rows.append(
            [
                fitted.kind,
                "noisy" if fitted.noisy else "full",
                "T = a (N log N)^b" if fitted.noisy else "T = a + b log N",
                str(fitted.slope),
                str(fitted.late),
                f"{fitted.theory:.2f}",
                f"{np.median([b.choice / b.measured for b in own]):.1f}",
                f"{np.median([b.gap_at_choice / b.gap for b in own]):.1f}",
                f"{sum(b.measured < b.shortest for b in found)} of {len(found)}",
            ]
        )
    columns = ["problem", "gradients", "law", "b measured", "b without the first decade"]
    columns += ["b of the lowest bound", "paper's T / best T", "its gap / smallest gap", "too short"]
    return columns, rows
