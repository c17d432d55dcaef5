"""The constants of a problem that appear in the theorems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


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

    Raises:
        ValueError: a constant is out of range, or they contradict each other.
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


def check_learning_rate(constants: Constants, learning_rate: float) -> None:
    """Raise ``ValueError`` for a learning rate that is not in ``(0, 1 / mu]``."""
    mu = constants.strong_convexity
    if not 0 < learning_rate * mu <= 1:
        raise ValueError(
            f"the learning rate must be above 0 and at most 1/mu = {1 / mu:g}, got {learning_rate}"
        )
