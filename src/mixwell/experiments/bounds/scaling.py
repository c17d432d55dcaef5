"""The best horizon for each budget, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from mixwell import theory
from mixwell.experiments.bounds.cells import LEARNING_RATE, shortest
from mixwell.experiments.bounds.problems import KINDS, Array
from mixwell.tables import Row, column

RESAMPLES = 2000


@final
@dataclass(frozen=True)
class BestHorizon:
    """The best horizon of one problem and budget.

    Args:
        seed: of the problem.
        budget: N.
        measured: T with the least measured gap, between the grid's points by a parabola in the logarithms.
        gap: there.
        theory: T that minimises the theorem's bound.
        gap_at_theory: the measured gap at the grid's horizon next to the paper's choice.
        choice: the paper's choice.
        shortest: the horizon from which on the theorem speaks.
    """

    seed: int
    budget: int
    measured: float
    gap: float
    theory: int
    gap_at_theory: float
    choice: int
    shortest: int


Best = dict[tuple[str, bool], list[BestHorizon]]
"""By kind of problem, and whether gradients are noisy."""


@final
@dataclass(frozen=True)
class Fit:
    """How the best horizon grows over all problems of a kind.

    Without noise ``T = intercept + slope log N``; with noise ``log T = intercept + slope log(N log N)``.

    Args:
        kind: of the problems.
        noisy: which law.
        slope: fitted; the exponent, with noise.
        low: of its 95% interval, by resampling the problems.
        high: of its 95% interval.
        intercept: fitted.
        theory: the slope of the horizons that minimise the bound, fitted in the same way.
        late: the slope without the first decade of budgets, where few horizons are long enough for the
            theorem; NaN where no more than a decade is there.
    """

    kind: str
    noisy: bool
    slope: float
    low: float
    high: float
    intercept: float
    theory: float
    late: float

    def __str__(self) -> str:
        law = "T ~ (N log N)^b, b" if self.noisy else "T = a + b log N, b"
        gradients = "noisy" if self.noisy else "full"
        return (
            f"{self.kind}, {gradients} gradients: {law} = {self.slope:.2f} [{self.low:.2f}, {self.high:.2f}] "
            f"measured, {self.theory:.2f} by the bound"
        )

    def predict(self, budget: Array) -> Array:
        """The fitted horizon for budgets."""
        line = self.intercept + self.slope * abscissa(budget, noisy=self.noisy)
        return np.exp(line) if self.noisy else line


def abscissa(budget: Array, *, noisy: bool) -> Array:
    """``log N``, or with noise ``log(N log N)``.

    Args:
        budget: N.
        noisy: which.

    Returns:
        What the best horizon is fitted against.
    """
    return np.log(budget * np.log(budget)) if noisy else np.log(budget)


def best_horizons(rows: Sequence[Row]) -> list[BestHorizon]:
    """The best horizon of every problem and budget.

    Args:
        rows: scaling rows of one kind of problems, with or without noise.

    Returns:
        In the order of seeds and budgets.
    """
    found: list[BestHorizon] = []
    for seed, budget in sorted({(int(r["seed"]), int(r["budget"])) for r in rows}):
        own = sorted(
            (r for r in rows if r["seed"] == seed and r["budget"] == budget), key=lambda r: r["horizon"]
        )
        horizons, gaps = np.array(column(own, "horizon")), np.array(column(own, "gap"))
        noisy = bool(own[0]["noisy"])
        constants = KINDS[str(own[0]["kind"])](seed).constants(str(own[0]["curvature"]), noisy=noisy)
        if noisy:
            choice = theory.stochastic_horizon(budget)
            ideal = theory.best_stochastic_horizon(constants, budget=budget)
        else:
            rate = LEARNING_RATE * constants.greatest_learning_rate
            mu = constants.strong_convexity
            choice = theory.deterministic_horizon(budget, learning_rate=rate, strong_convexity=mu)
            ideal = theory.best_deterministic_horizon(constants, budget=budget, learning_rate=rate)
        near = int(np.abs(np.log(horizons / min(choice, budget))).argmin())
        found.append(
            BestHorizon(
                seed=seed,
                budget=budget,
                measured=lowest(horizons, gaps),
                gap=float(gaps.min()),
                theory=ideal,
                gap_at_theory=float(gaps[near]),
                choice=choice,
                shortest=shortest(noisy, constants),
            )
        )
    return found


def growth_of(rows: Sequence[Row]) -> tuple[Best, list[Fit]]:
    """The best horizons and their growth, of everything that was measured.

    Args:
        rows: all measurements; those for scaling are taken.

    Returns:
        The best horizons by kind of problem and noise, and a fit for each.
    """
    scaling = [row for row in rows if row["purpose"] == "scaling"]
    best: Best = {}
    for kind, noisy in dict.fromkeys((str(row["kind"]), int(row["noisy"])) for row in scaling):
        own = [row for row in scaling if (row["kind"], row["noisy"]) == (kind, noisy)]
        best[kind, bool(noisy)] = best_horizons(own)
    return best, [fit(kind, found, noisy=noisy) for (kind, noisy), found in best.items()]


def lowest(horizons: Array, gaps: Array) -> float:
    """Where the gap is least, between the points.

    It is the vertex of the parabola through the least point and its neighbours, in logarithms.

    Args:
        horizons: ascending.
        gaps: positive.

    Returns:
        The horizon.

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
    """Fit the growth of the best horizon.

    Args:
        kind: of the problems.
        best: of several problems and budgets.
        noisy: which law.

    Returns:
        The fit, with its interval from resampling whole problems.
    """
    seeds = sorted({b.seed for b in best})
    random = np.random.default_rng(0)
    slope, intercept = _line(best, [b.measured for b in best], noisy)
    by_seed = {seed: [b for b in best if b.seed == seed] for seed in seeds}
    drawn: list[float] = []
    for _ in range(RESAMPLES):
        sample = [b for seed in random.choice(seeds, len(seeds)) for b in by_seed[int(seed)]]
        drawn.append(_line(sample, [b.measured for b in sample], noisy)[0])
    low, high = np.quantile(drawn, [0.025, 0.975])
    # Where a budget is too short, the bound is least at T = 1, outside of the theorem.
    sound = [b for b in best if b.theory > 1]
    ideal = _line(sound, [float(b.theory) for b in sound], noisy)[0] if sound else math.nan
    after = [b for b in best if b.budget >= 10 * min(b.budget for b in best)]
    late = _line(after, [b.measured for b in after], noisy)[0] if after else math.nan
    return Fit(kind, noisy, slope, float(low), float(high), intercept, ideal, late)


def _line(best: Sequence[BestHorizon], horizons: Sequence[float], noisy: bool) -> tuple[float, float]:
    x = abscissa(np.array([float(b.budget) for b in best]), noisy=noisy)
    y = np.log(horizons) if noisy else np.asarray(horizons)
    if np.ptp(x) == 0:
        return math.nan, float(np.mean(y))
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def parting(growth: Fit, found: Sequence[BestHorizon]) -> str:
    """Where the theory and the measurements of a kind part, in a sentence or two.

    Args:
        growth: the fit.
        found: the best horizons that it was fitted to.

    Returns:
        The sentences.
    """
    last = max(b.budget for b in found)
    own = [b for b in found if b.budget == last]
    times = float(np.median([b.choice / b.measured for b in own]))
    price = float(np.median([b.gap_at_theory / b.gap for b in own]))
    first = float(np.median([b.shortest for b in own]))
    inside = growth.low <= growth.theory <= growth.high
    late = "" if math.isnan(growth.late) else f"; without the first decade of budgets b = {growth.late:.2f}"
    return (
        f"{growth}; the bound's is {'inside' if inside else 'outside'} of the interval. At N = {last} the "
        f"paper's T is {times:.1f} times the best one and its gap {price:.1f} times the least (medians over "
        f"{len(own)} problems). The theorem speaks of T from {first:.0f} on{late}."
    )
