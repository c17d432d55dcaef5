"""The bounds of both theorems, with all their constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from mixwell.reference.theory.constants import Constants, check_learning_rate
from mixwell.reference.theory.horizons import noisy_learning_rate


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
        horizon: T.
        learning_rate: eta.
        distance: of the round's first parameters from the minimizer for its weights, where it is known; R
            otherwise, which bounds it.
    """
    c = constants
    check_learning_rate(c, learning_rate)
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

    Args:
        budget: N.
        horizon: T.
        learning_rate: eta.
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

    Args:
        budget: N.
        horizon: T.
        learning_rate: eta, by default :func:`noisy_learning_rate`.
    """
    c = constants
    mu, eta = c.strong_convexity, learning_rate
    if eta is None:
        eta = noisy_learning_rate(c, horizon=horizon)
    check_learning_rate(c, eta)
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
