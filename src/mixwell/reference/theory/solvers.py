"""The horizons that minimize the bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mixwell.reference.theory.bounds import Bound, deterministic_bound, stochastic_bound
from mixwell.reference.theory.constants import Constants
from mixwell.reference.theory.horizons import shortest_horizon, shortest_noisy_horizon
from mixwell.simplex.horizons import check_budget


def best_deterministic_horizon(constants: Constants, *, budget: int, learning_rate: float) -> int:
    """Return the minimizer of :func:`deterministic_bound` between :func:`shortest_horizon` and the budget."""
    return _least(
        lambda t: deterministic_bound(constants, budget=budget, horizon=t, learning_rate=learning_rate),
        shortest_horizon(constants, learning_rate=learning_rate),
        budget,
    )


def best_stochastic_horizon(constants: Constants, *, budget: int) -> int:
    """Return the minimizer of :func:`stochastic_bound` between :func:`shortest_noisy_horizon` and the budget."""
    return _least(
        lambda t: stochastic_bound(constants, budget=budget, horizon=t),
        shortest_noisy_horizon(constants),
        budget,
    )


def _least(bound: Callable[[int], Bound], first: int, budget: int) -> int:
    """Return the integer with the least bound: by a grid, then every integer between its neighbors."""
    check_budget(budget)
    if first > budget:
        raise ValueError(
            f"the theorem holds for horizons of at least {first}, more than the budget of {budget} steps"
        )
    grid = sorted({round(t) for t in np.geomspace(first, budget, 400)})
    best = min(range(len(grid)), key=lambda i: bound(grid[i]).reducible)
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return min(range(low, high + 1), key=lambda t: bound(t).reducible)
