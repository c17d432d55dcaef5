"""The measurements: one cell is one problem with one budget and a grid of horizons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import numpy as np

from mixwell import theory
from mixwell.experiments.bounds.problems import KINDS, Array, BilevelProblem, Indices
from mixwell.experiments.bounds.simulation import simulate
from mixwell.sweeps import StoppedError
from mixwell.tables import Row

MEASUREMENTS = "measurements.csv"
LEARNING_RATE = 0.9
"""Of the greatest that the theorem allows."""


@final
@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        purpose: ``"theorem"`` (the theorem's step size and its horizons, beside the bounds) or ``"scaling"`` (all
            horizons, and a step size for the true size of the hypergradients, to find the best one).
        kind: of the problem.
        seed: of the problem.
        noisy: whether gradients are.
        curvature: of the hypergradients.
        budget: N.
        copies: how many runs of the noise are averaged (1 without noise).
    """

    purpose: str
    kind: str
    seed: int
    noisy: bool
    curvature: str
    budget: int
    copies: int = 1

    @property
    def name(self) -> str:
        """Fit for a file."""
        noise = "noisy" if self.noisy else "full"
        return f"{self.purpose}-{self.kind.replace(' ', '-')}-{self.seed}-{noise}-{self.curvature}-n{self.budget}"


def measure(
    cell: Cell, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]
) -> list[Row]:
    """Measure a cell. It takes seconds, so it has no checkpoint of its own.

    Args:
        cell: what to measure.
        checkpoint: not used.
        report: told the steps done.
        stopping: asks whether to stop.

    Returns:
        A row per horizon: the measured ``F(w_avg) - F*``, and the bound where the theorem speaks.

    Raises:
        StoppedError: it was asked to.
    """

    def watch(step: int) -> None:
        report(step)
        if stopping():
            raise StoppedError

    problem = KINDS[cell.kind](cell.seed)
    constants = problem.constants(cell.curvature, noisy=cell.noisy)
    horizons = _horizons(cell, constants)
    rates = np.array([_learning_rate(cell, constants, t) for t in horizons])
    sizes = [
        theory.mirror_step_size(rounds=int(cell.budget // t), domains=constants.domains, size=size)
        for t in horizons
        for size in [_size(cell, constants, problem)]
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
                "bound_optimisation": bound.optimisation,
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
    return sorted({round(t) for t in np.geomspace(first, cell.budget, 8)}) if first <= cell.budget else []


def shortest(noisy: bool, constants: theory.Constants) -> int:
    """The shortest horizon of which the theorem speaks.

    Args:
        noisy: whether the stochastic one is meant.
        constants: of the problem.

    Returns:
        T; with noise, the first with ``4 log T / (mu T) <= min(1/L_hat, mu/L^2, mu R-bar^2 / (9 sigma^2))``.
    """
    if not noisy:
        rate = LEARNING_RATE * constants.greatest_learning_rate
        return theory.shortest_horizon(constants, learning_rate=rate)
    mu, reach = constants.strong_convexity, 3 * constants.wander
    limit = min(constants.greatest_learning_rate, mu * reach**2 / (9 * constants.noise**2))
    horizon = 3
    while 4 * math.log(horizon) / (mu * horizon) > limit:
        horizon += 1
    return horizon


def _learning_rate(cell: Cell, constants: theory.Constants, horizon: int) -> float:
    if cell.noisy:
        return theory.noisy_learning_rate(constants, horizon=horizon)
    return LEARNING_RATE * constants.greatest_learning_rate


def _size(cell: Cell, constants: theory.Constants, problem: BilevelProblem) -> float:
    if cell.purpose == "scaling":
        return problem.greatest_hypergradient()
    return constants.noisy_gradient * constants.noisy_validation_gradient / constants.least_curvature


def _bound(cell: Cell, constants: theory.Constants, horizon: int, rate: float) -> theory.Bound:
    budget = horizon * (cell.budget // horizon)
    if cell.noisy:
        return theory.stochastic_bound(constants, budget=budget, horizon=horizon, learning_rate=rate)
    return theory.deterministic_bound(constants, budget=budget, horizon=horizon, learning_rate=rate)
