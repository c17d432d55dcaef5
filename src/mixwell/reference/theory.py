"""The paper's bounds, and its choices of horizon and step size, as functions of the budget and the constants.

"Less is More: Convergence Benefits of Fewer Data Weight Updates over Longer Horizon" (Das, Patel,
Razaviyayn, Mirrokni): the main convergence theorem (Theorem "thm2", deterministic) and its stochastic case
(Theorem "thm:stochastic-case"). The arguments are the paper's budget N (``budget``), horizon T (``horizon``) and
learning rate eta (``learning_rate``), and the :class:`Constants` of a problem::

    constants = theory.Constants(domains=3, gradient=2.0, smoothness=4.0, ...)
    theory.deterministic_bound(constants, budget=10_000, horizon=200, learning_rate=0.05).total
    theory.best_deterministic_horizon(constants, budget=10_000, learning_rate=0.05)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from mixwell.simplex.horizons import check_budget
from mixwell.simplex.horizons import deterministic_horizon as deterministic_horizon
from mixwell.simplex.horizons import stochastic_horizon as stochastic_horizon
from mixwell.simplex.updates.step_size import mirror_step_size as mirror_step_size


@final
@dataclass(frozen=True)
class Constants:
    """The constants of a problem (the paper's assumptions 1 to 4).

    Args:
        domains: m.
        gradient: G; every domain's loss is G-Lipschitz.
        smoothness: L; every domain's loss is L-smooth.
        strong_convexity: mu; every domain's loss is mu-strongly convex.
        validation_gradient: G_V; the validation loss is G_V-Lipschitz.
        validation_smoothness: L_V; the validation loss is L_V-smooth.
        least_curvature: mu_hat, a lower bound of the curvature that is used.
        greatest_curvature: L_hat, an upper bound of it.
        curvature_error: delta, its distance from the Hessian at the optimum, in operator norm.
        spread: D, the greatest distance of two domains' minimizers.
        start: the distance of the first parameters from the minimizer for the first weights.
        noise: sigma, the standard deviation of the gradients.
    """

    domains: int
    gradient: float
    smoothness: float
    strong_convexity: float
    validation_gradient: float
    validation_smoothness: float
    least_curvature: float
    greatest_curvature: float
    curvature_error: float
    spread: float
    start: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.domains < 1:
            raise ValueError(f"there must be at least 1 domain, got {self.domains}")
        for name in ("smoothness", "strong_convexity", "least_curvature", "greatest_curvature"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        others = ("gradient", "validation_gradient", "validation_smoothness", "curvature_error")
        for name in (*others, "spread", "start", "noise"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if self.strong_convexity > self.smoothness:
            raise ValueError(
                f"strong_convexity {self.strong_convexity} cannot exceed smoothness {self.smoothness}"
            )
        if self.least_curvature > self.greatest_curvature:
            raise ValueError(
                f"least_curvature {self.least_curvature} cannot exceed greatest_curvature "
                f"{self.greatest_curvature}"
            )

    @property
    def noisy_gradient(self) -> float:
        """``G~ = sqrt(G^2 + sigma^2)``."""
        return math.hypot(self.gradient, self.noise)

    @property
    def noisy_validation_gradient(self) -> float:
        """``G~_V = sqrt(G_V^2 + sigma^2)``."""
        return math.hypot(self.validation_gradient, self.noise)

    @property
    def wander(self) -> float:
        """``max(||theta_00 - theta*_0||, (2 L / mu + 1) D)``; R is twice and R-bar three times this."""
        return max(self.start, (2 * self.smoothness / self.strong_convexity + 1) * self.spread)

    @property
    def greatest_learning_rate(self) -> float:
        """``min(1 / L_hat, mu / L^2)``; the theorems hold for learning rates below it."""
        return min(1 / self.greatest_curvature, self.strong_convexity / self.smoothness**2)


@final
@dataclass(frozen=True)
class Bound:
    """A bound of ``F(w_avg) - F*`` in its three parts.

    Args:
        optimization: (I), of mirror descent with K steps; it grows with the horizon.
        horizon_bias: (II), of looking back over T steps only; it falls with the horizon.
        curvature: (III), of the approximate Hessian, independent of budget and horizon.
    """

    optimization: float
    horizon_bias: float
    curvature: float

    @property
    def reducible(self) -> float:
        """(I) + (II)."""
        return self.optimization + self.horizon_bias

    @property
    def total(self) -> float:
        """(I) + (II) + (III)."""
        return self.reducible + self.curvature


def hypergradient_error_bound(
    constants: Constants, *, horizon: float, learning_rate: float, distance: float | None = None
) -> float:
    """Return the bound of ``max_j |h_j - dF/dw_j|`` for the hypergradient of a round (proof of Theorem "thm2").

    ``(1 - eta mu / 2)^(T-1) (eta T (L G_V + L_V G) R + G G_V / mu) + delta G G_V / min(mu^2, mu_hat^2)``

    Args:
        distance: of the round's first parameters from the minimizer for its weights, where it is known; R
            otherwise, which bounds it.
    """
    c = constants
    _check_learning_rate(c, learning_rate)
    away = 2 * c.wander if distance is None else distance
    fading = (1 - learning_rate * c.strong_convexity / 2) ** (horizon - 1)
    slope = c.smoothness * c.validation_gradient + c.validation_smoothness * c.gradient
    size = c.gradient * c.validation_gradient
    bias = fading * (learning_rate * horizon * slope * away + size / c.strong_convexity)
    return bias + c.curvature_error * size / min(c.strong_convexity, c.least_curvature) ** 2


def deterministic_bound(
    constants: Constants, *, budget: float, horizon: float, learning_rate: float
) -> Bound:
    """Return the bound of ``F(w_avg) - F*`` with full gradients (Theorem "thm2").

    ``3 G G_V sqrt(log m) / (2 mu_hat sqrt(K))``, ``+ 2 x`` :func:`hypergradient_error_bound`, where ``K = N
    / T``. It holds for convex F, ``eta <`` :attr:`Constants.greatest_learning_rate`, ``T >=``
    :func:`shortest_horizon`, uniform first weights, and the step size :func:`mirror_step_size` with ``size
    = G G_V / mu_hat``.
    """
    c = constants
    rounds = budget / horizon
    size = c.gradient * c.validation_gradient
    curvature = c.curvature_error * size / min(c.strong_convexity, c.least_curvature) ** 2
    error = hypergradient_error_bound(c, horizon=horizon, learning_rate=learning_rate)
    return Bound(
        optimization=1.5 * size * math.sqrt(math.log(c.domains)) / (c.least_curvature * math.sqrt(rounds)),
        horizon_bias=2 * (error - curvature),
        curvature=2 * curvature,
    )


def stochastic_bound(
    constants: Constants, *, budget: float, horizon: float, learning_rate: float | None = None
) -> Bound:
    """Return the bound of ``E F(w_avg) - F*`` with noisy gradients, with the numbers of its proof.

    Theorem "thm:stochastic-case" is stated up to constants; these are those of its proof. (The proof takes the
    mean of the greatest hypergradient for the greatest mean, and its square for the mean square, so they are
    the paper's numbers rather than proven ones.)

        (I)   ``3 G~ G~_V sqrt(log m) / (2 mu_hat sqrt(K))``
        (II)  ``2 R-bar (L G_V eta T + L_V G~ / mu_hat) (1 - eta mu / 2)^(T-1) + 2 G_V G (1 - eta mu)^T / mu``
              ``+ 2 sqrt(eta) sigma (L G_V / mu^1.5 + L_V G~ / (sqrt(mu) mu_hat))``
        (III) ``2 delta G_V G / min(mu^2, mu_hat^2)``

    By default eta is :func:`noisy_learning_rate`.
    """
    c = constants
    mu, eta = c.strong_convexity, learning_rate
    if eta is None:
        eta = noisy_learning_rate(c, horizon=horizon)
    _check_learning_rate(c, eta)
    rounds = budget / horizon
    size = c.noisy_gradient * c.noisy_validation_gradient
    fading = (1 - eta * mu / 2) ** (horizon - 1)
    drift = c.validation_smoothness * c.noisy_gradient / c.least_curvature
    bias = 6 * c.wander * (c.smoothness * c.validation_gradient * eta * horizon + drift) * fading
    bias += 2 * c.validation_gradient * c.gradient * (1 - eta * mu) ** horizon / mu
    shake = c.smoothness * c.validation_gradient / mu**1.5 + drift / math.sqrt(mu)
    bias += 2 * math.sqrt(eta) * c.noise * shake
    exact = c.gradient * c.validation_gradient
    return Bound(
        optimization=1.5 * size * math.sqrt(math.log(c.domains)) / (c.least_curvature * math.sqrt(rounds)),
        horizon_bias=bias,
        curvature=2 * c.curvature_error * exact / min(mu, c.least_curvature) ** 2,
    )


def shortest_horizon(constants: Constants, *, learning_rate: float) -> int:
    """Return ``ceil(log 4 / (eta mu))``, the least horizon of the deterministic theorem."""
    _check_learning_rate(constants, learning_rate)
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
    low, high = 3, 3  # log T / T decreases from 3 on, so that bisection finds the first

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


def _check_learning_rate(constants: Constants, learning_rate: float) -> None:
    """Raise ``ValueError`` for a learning rate that is not in ``(0, 1 / mu]``."""
    mu = constants.strong_convexity
    if not 0 < learning_rate * mu <= 1:
        raise ValueError(
            f"the learning rate must be above 0 and at most 1/mu = {1 / mu:g}, got {learning_rate}"
        )
