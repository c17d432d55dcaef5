"""The least horizons of the theorems, and the learning rate of the stochastic one."""

from __future__ import annotations

import math

from mixwell.reference.theory.constants import Constants, check_learning_rate


def shortest_horizon(constants: Constants, *, learning_rate: float) -> int:
    """Return ``ceil(log 4 / (eta mu))``, the least horizon of the deterministic theorem."""
    check_learning_rate(constants, learning_rate)
    return max(1, math.ceil(math.log(4) / (learning_rate * constants.strong_convexity)))


def shortest_noisy_horizon(constants: Constants) -> int:
    """Return the least horizon of the stochastic theorem.

    The first T >= 3 with ``4 log T / (mu T) <= min(1/L_hat, mu/L^2, mu R-bar^2 / (9 sigma^2))``.

    Raises:
        ValueError: there is none, because start and spread are zero.
    """
    mu, limit = constants.strong_convexity, constants.greatest_learning_rate
    if constants.noise > 0:
        limit = min(limit, mu * (3 * constants.wander) ** 2 / (9 * constants.noise**2))
    if limit <= 0:
        raise ValueError("no learning rate is low enough for the theorem: start and spread are zero")
    low, high = 3, 3  # log T / T decreases from 3 on, so bisection finds the first

    def fits(horizon: int) -> bool:
        return 4 * math.log(horizon) / (mu * horizon) <= limit

    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def noisy_learning_rate(constants: Constants, *, horizon: float) -> float:
    """Return ``4 log T / (mu T)``, the stochastic theorem's, but at most :attr:`Constants.greatest_learning_rate`.

    Short horizons, for which the theorem's is too high, are outside of the theorem.
    """
    wanted = 4 * math.log(max(horizon, 2)) / (constants.strong_convexity * horizon)
    return min(wanted, constants.greatest_learning_rate)
