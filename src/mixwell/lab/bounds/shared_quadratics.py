"""Quadratics with one Hessian, for which F is convex."""

from __future__ import annotations

from typing import final

import numpy as np
from typing_extensions import override

from mixwell.lab.bounds.problems import Array, BilevelProblem, diameter, norm, unit
from mixwell.reference.theory import Constants


@final
class SharedQuadratics(BilevelProblem):
    """``l_j = (theta - c_j)^T A (theta - c_j) / 2`` with a common A.

    So ``theta*(w) = sum_j w_j c_j``, and F is convex. The eigenvalues of A go from 1 to ``condition``. The
    validation loss is a quadratic with another Hessian, and no mixture reaches its minimum, so the
    hypergradients do not vanish at the best weights. Noise is uniform on a sphere of radius sigma, so its
    variance is ``sigma^2`` and it is bounded.

    Args:
        domains: m.
        dimension: d.
        condition: L / mu.
        noise: sigma.
    """

    def __init__(
        self, seed: int, *, domains: int = 3, dimension: int = 5, condition: float = 4.0, noise: float = 1.0
    ) -> None:
        random = np.random.default_rng(seed)
        self.name = f"quadratic-{seed}"
        self.domains, self.dimension, self.noise_bound = domains, dimension, noise
        basis = _orthogonal(random, dimension)
        self.matrix = (basis * np.linspace(1.0, condition, dimension)) @ basis.T
        other = _orthogonal(random, dimension)
        self.validation_matrix = (other * np.linspace(0.5, 1.5, dimension)) @ other.T
        self.centers = unit(random.standard_normal((domains, dimension)))
        mixture = random.dirichlet(np.full(domains, 3.0))
        self.target = mixture @ self.centers + unit(random.standard_normal(dimension))
        self.start = self.centers.mean(0) + unit(random.standard_normal(dimension))

    @override
    def gradients(self, theta: Array) -> Array:
        """``A (theta - c_j)``."""
        return (theta[:, None] - self.centers) @ self.matrix

    @override
    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        exact = self.gradients(theta)
        return exact + self.noise_bound * unit(random.standard_normal(exact.shape))

    @override
    def validation_gradient(self, theta: Array) -> Array:
        """``A_V (theta - c_V)``."""
        return (theta - self.target) @ self.validation_matrix

    @override
    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        exact = self.validation_gradient(theta)
        return exact + self.noise_bound * unit(random.standard_normal(exact.shape))

    @override
    def validation_loss(self, theta: Array) -> Array:
        """``(theta - c_V)^T A_V (theta - c_V) / 2``."""
        return ((theta - self.target) * self.validation_gradient(theta)).sum(-1) / 2

    @override
    def minimizer(self, weights: Array, near: Array | None = None) -> Array:
        """``sum_j w_j c_j``."""
        return weights @ self.centers

    @override
    def hessian(self, weights: Array, theta: Array) -> Array:
        return np.broadcast_to(self.matrix, (len(weights), self.dimension, self.dimension))

    @override
    def diagonal_error(self) -> float:
        """``||A - diag A||``."""
        return float(np.abs(np.linalg.eigvalsh(self.matrix * (1 - np.eye(self.dimension)))).max())

    @override
    def base_constants(self, *, noisy: bool) -> Constants:
        """From the eigenvalues of A and A_V, and the ball around the mean of the centers."""
        values = np.linalg.eigvalsh(self.matrix)
        mu, smooth = float(values[0]), float(values[-1])
        middle = self.centers.mean(0)
        at_middle = norm(self.gradients(middle[None])[0])
        noise = self.noise_bound if noisy else 0.0
        radius = max(norm(self.start - middle), (at_middle + noise) / mu)
        validation_smooth = float(np.linalg.eigvalsh(self.validation_matrix)[-1])
        at_target = norm(self.validation_gradient(middle[None]))
        return Constants(
            domains=self.domains,
            gradient=at_middle + smooth * radius,
            smoothness=smooth,
            strong_convexity=mu,
            validation_gradient=at_target + validation_smooth * radius,
            validation_smoothness=validation_smooth,
            least_curvature=mu,
            greatest_curvature=smooth,
            curvature_error=0.0,
            spread=diameter(self.centers),
            start=norm(self.start - middle),
            noise=noise,
        )


def _orthogonal(random: np.random.Generator, dimension: int) -> Array:
    return np.linalg.qr(random.standard_normal((dimension, dimension)))[0]
