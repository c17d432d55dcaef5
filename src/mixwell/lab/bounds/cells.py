"""The measurements: one cell is one problem with one budget and a grid of horizons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import final

import numpy as np

from mixwell.lab.bounds.logistic import LogisticRegression
from mixwell.lab.bounds.problems import Array, BilevelProblem, Indices
from mixwell.lab.bounds.shared_quadratics import SharedQuadratics
from mixwell.lab.bounds.simulation import leap, simulate
from mixwell.lab.tables import Row
from mixwell.reference import theory
from mixwell.training.engines import StoppedError

MEASUREMENTS = "measurements.csv"
KINDS: dict[str, Callable[[int], BilevelProblem]] = {
    "quadratic": partial(SharedQuadratics, condition=4.0, noise=1.0),
    "steep quadratic": partial(SharedQuadratics, condition=10.0),
    "noisy quadratic": partial(SharedQuadratics, condition=1.25, noise=3.0),
    "logistic": LogisticRegression,
}
"""Kinds of problems by name; a seed gives a problem."""
LEAP = 10_000_000
"""Larger budgets are computed a round at a time."""
LEARNING_RATE = 0.9
"""As a fraction of the largest that the theorem allows."""


@final
@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        purpose: ``"theorem"`` (the theorem's step size and horizons, compared with the bounds) or ``"scaling"``
            (all horizons, and a step size for the true size of the hypergradients, to find the best horizon).
        kind: a key of :data:`KINDS`.
        curvature: that of the hypergradients.
        budget: N.
        copies: number of runs of the noise that are averaged (1 without noise).
    """

    purpose: str
    kind: str
    seed: int
    noisy: bool
    curvature: str
    budget: int
    copies: int = 1

    @property
    def work(self) -> int:
        """Number of steps that take about as long, for the progress bar."""
        return self.budget if self.budget <= LEAP else 100_000

    @property
    def name(self) -> str:
        """A file name."""
        noise = "noisy" if self.noisy else "full"
        return f"{self.purpose}-{self.kind.replace(' ', '-')}-{self.seed}-{noise}-{self.curvature}-n{self.budget}"


def measure(cell: Cell, /, *, report: Callable[[int], None], stopping: Callable[[], bool]) -> list[Row]:
    """Return a row per horizon: the measured ``F(w_avg) - F*``, and the bound where the theorem applies.

    Args:
        report: called with the number of steps done.
        stopping: returns whether to stop.

    Raises:
        StoppedError: ``stopping`` returned true.
    """

    def watch(step: int) -> None:
        report(step * cell.work // cell.budget)
        if stopping():
            raise StoppedError

    problem = KINDS[cell.kind](cell.seed)
    constants = problem.constants(cell.curvature, noisy=cell.noisy)
    horizons = _horizons(cell, constants)
    rates = np.array([_learning_rate(cell, constants, t) for t in horizons])
    size = _size(cell, constants, problem)
    sizes = [
        theory.mirror_step_size(rounds=cell.budget // t, domains=constants.domains, size=size)
        for t in horizons
    ]
    repeated, rows_rates, rows_sizes = (
        np.repeat(np.asarray(values, dtype=np.float64), cell.copies) for values in (horizons, rates, sizes)
    )

    def error_bounds(rows: Indices, distances: Array) -> Array:
        return np.array(
            [
                theory.hypergradient_error_bound(constants, horizon=t, learning_rate=rate, distance=d)
                for t, rate, d in zip(repeated[rows], rows_rates[rows], distances, strict=True)
            ]
        )

    if cell.budget > LEAP:
        assert isinstance(problem, SharedQuadratics)
        outcomes = leap(
            problem,
            budget=cell.budget,
            horizons=repeated,
            learning_rates=rows_rates,
            step_sizes=rows_sizes,
            error_bounds=error_bounds,
            report=watch,
        )
    else:
        outcomes = simulate(
            problem,
            budget=cell.budget,
            horizons=repeated,
            learning_rates=rows_rates,
            step_sizes=rows_sizes,
            curvature=cell.curvature,
            random=np.random.default_rng([cell.seed, cell.budget]) if cell.noisy else None,
            error_bounds=error_bounds if cell.purpose == "theorem" and not cell.noisy else None,
            report=watch,
        )
    gaps = (problem.outer(outcomes.average) - problem.best()[1]).reshape(-1, cell.copies)
    errors = outcomes.error.reshape(-1, cell.copies)[:, 0]
    ratios = outcomes.error_ratio.reshape(-1, cell.copies)[:, 0]
    rows: list[Row] = []
    for index, horizon in enumerate(horizons):
        rounds = cell.budget // int(horizon)
        bound = _bound(cell, constants, int(horizon), float(rates[index]))
        rows.append(
            {
                **asdict(cell),
                "noisy": int(cell.noisy),
                "horizon": int(horizon),
                "rounds": rounds,
                "learning_rate": float(rates[index]),
                "step_size": sizes[index],
                "gap": float(gaps[index].mean()),
                "gap_error": float(gaps[index].std(ddof=1) / math.sqrt(cell.copies))
                if cell.copies > 1
                else 0.0,
                "bound": bound.total,
                "bound_optimisation": bound.optimization,
                "bound_horizon": bound.horizon_bias,
                "bound_curvature": bound.curvature,
                "error": float(errors[index]),
                "error_ratio": float(ratios[index]),
            }
        )
    return rows


def _horizons(cell: Cell, constants: theory.Constants) -> list[int]:
    if cell.purpose == "scaling":
        return sorted({round(t) for t in np.geomspace(1, cell.budget, 28)})
    first = shortest(cell.noisy, constants)
    if cell.budget > LEAP:  # shorter ones have millions of rounds, longer ones too few
        return sorted({round(t) for t in np.geomspace(15 * first, 1500 * first, 8)})
    return sorted({round(t) for t in np.geomspace(first, cell.budget, 8)}) if first <= cell.budget else []


def shortest(noisy: bool, constants: theory.Constants) -> int:
    """Return the shortest horizon to which the (stochastic, if noisy) theorem applies."""
    if noisy:
        return theory.shortest_noisy_horizon(constants)
    return theory.shortest_horizon(constants, learning_rate=full_rate(constants))


def full_rate(constants: theory.Constants) -> float:
    """Return the learning rate with full gradients, somewhat below the theorem's maximum."""
    return LEARNING_RATE * constants.greatest_learning_rate


def _learning_rate(cell: Cell, constants: theory.Constants, horizon: int) -> float:
    if cell.noisy:
        return theory.noisy_learning_rate(constants, horizon=horizon)
    return full_rate(constants)


def _size(cell: Cell, constants: theory.Constants, problem: BilevelProblem) -> float:
    if cell.purpose == "scaling":
        return problem.greatest_hypergradient()
    return constants.noisy_gradient * constants.noisy_validation_gradient / constants.least_curvature


def _bound(cell: Cell, constants: theory.Constants, horizon: int, rate: float) -> theory.Bound:
    if cell.purpose == "scaling":  # the step size is not the theorem's
        return theory.Bound(math.nan, math.nan, math.nan)
    budget = horizon * (cell.budget // horizon)
    if cell.noisy:
        return theory.stochastic_bound(constants, budget=budget, horizon=horizon, learning_rate=rate)
    return theory.deterministic_bound(constants, budget=budget, horizon=horizon, learning_rate=rate)
