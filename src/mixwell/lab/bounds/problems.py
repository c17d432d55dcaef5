"""Strongly convex bilevel problems with computed constants.

No run of either kind leaves a certain ball. Around any center z, the map ``theta -> theta - eta g`` with
``eta <= 1/L`` contracts by ``1 - eta mu`` and moves z by at most ``eta s``, where ``s = max_j ||grad
l_j(z)|| + noise``; so the ball of radius ``max(||theta_0 - z||, s / mu)`` is mapped into itself. The
Lipschitz constants are those of that ball.

All methods work on rows: ``theta`` has the shape ``(rows, d)`` and ``weights`` ``(rows, m)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mixwell.reference.theory import Constants

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
CURVATURES = ("isotropic", "diagonal", "exact")
GRID = 12


class BilevelProblem(ABC):
    """Domains, a validation loss, and the constants that the theorems require.

    Attributes:
        domains: m.
        dimension: d.
        start: theta_0, shape ``(d,)``.
        noise_bound: maximum distance of a noisy gradient from the gradient.
    """

    name: str
    domains: int
    dimension: int
    start: Array
    noise_bound: float

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """Return the domains' gradients, shape ``(rows, m, d)``."""

    @abstractmethod
    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        """Return unbiased, noisy :meth:`gradients`."""

    @abstractmethod
    def validation_gradient(self, theta: Array) -> Array:
        """Return the gradient of the validation loss, shape ``(rows, d)``."""

    @abstractmethod
    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        """Return an unbiased, noisy :meth:`validation_gradient`."""

    @abstractmethod
    def validation_loss(self, theta: Array) -> Array:
        """Return the validation loss, shape ``(rows,)``."""

    @abstractmethod
    def minimizer(self, weights: Array, near: Array | None = None) -> Array:
        """Return ``theta*(w)``, shape ``(rows, d)``; ``near`` is an initial guess."""

    @abstractmethod
    def hessian(self, weights: Array, theta: Array) -> Array:
        """Return the Hessian of the weighted loss, shape ``(rows, d, d)``."""

    @abstractmethod
    def base_constants(self, *, noisy: bool) -> Constants:
        """Return the constants for the exact Hessian at the optimum."""

    @abstractmethod
    def diagonal_error(self) -> float:
        """Return a bound of ``||H - diag H||`` in operator norm, for all weights."""

    def greatest_gap(self) -> float:
        """Return ``max_w F(w) - F*`` on a grid of weights; a larger bound is not informative."""
        return float(self.outer(simplex_grid(self.domains, GRID)).max()) - self.best()[1]

    def outer(self, weights: Array) -> Array:
        """Return ``F(w) = L_V(theta*(w))``, shape ``(rows,)``."""
        return self.validation_loss(self.minimizer(weights))

    def hypergradient(self, weights: Array, theta: Array | None = None) -> Array:
        """Return the exact ``-<grad L_V, H^-1 grad l_j>`` at the minimizer (Eq. 2), shape ``(rows, m)``."""
        star = self.minimizer(weights) if theta is None else theta
        target = np.linalg.solve(self.hessian(weights, star), self.validation_gradient(star)[..., None])
        return -(self.gradients(star) @ target)[..., 0]

    def curvature(self, kind: str, weights: Array, theta: Array) -> Array:
        """Return the H that a round uses, shape ``(rows, d, d)``.

        Args:
            kind: ``"exact"``, the Hessian at the minimizer; its ``"diagonal"``; or ``"isotropic"``, gamma I with
                gamma midway between mu and L.
            theta: the minimizer for the weights.
        """
        exact = self.hessian(weights, theta)
        eye = np.eye(self.dimension)
        if kind == "diagonal":
            return exact * eye
        if kind == "isotropic":
            base = self.base_constants(noisy=False)
            return np.broadcast_to(eye * (base.strong_convexity + base.smoothness) / 2, exact.shape)
        return exact

    def constants(self, kind: str = "exact", *, noisy: bool = False) -> Constants:
        """Return the theorem's constants for one of :data:`CURVATURES`.

        All curvatures have eigenvalues between mu and L (a diagonal entry of a matrix is between its extreme
        eigenvalues), and ``gamma I`` with gamma midway is at most ``(L - mu) / 2`` from any of them.
        """
        base = self.base_constants(noisy=noisy)
        mu, smooth = base.strong_convexity, base.smoothness
        if kind == "isotropic":
            middle = (mu + smooth) / 2
            return replace(
                base, least_curvature=middle, greatest_curvature=middle, curvature_error=(smooth - mu) / 2
            )
        error = self.diagonal_error() if kind == "diagonal" else 0.0
        return replace(base, curvature_error=error)

    def greatest_hypergradient(self) -> float:
        """Return ``max_w max_j |dF/dw_j|`` on a grid of weights, which ``G G_V / mu_hat`` bounds."""
        return float(np.abs(self.hypergradient(simplex_grid(self.domains, GRID))).max())

    def best(self, *, gap: float = 1e-8, steps: int = 5_000) -> tuple[Array, float]:
        """Minimize F by mirror descent with exact hypergradients; return the weights ``(m,)`` and ``F*``.

        For convex F, ``F(w) - F* <= <grad F, w> - min_j dF/dw_j``; it stops when that is below ``gap``.
        """
        weights = np.full((1, self.domains), 1 / self.domains)
        star = self.minimizer(weights)
        value, rate = float(self.validation_loss(star)[0]), 1.0 / self.greatest_hypergradient()
        for _ in range(steps):
            slope = self.hypergradient(weights, star)
            if float((slope * weights).sum() - slope.min()) < gap:
                break
            while True:
                tried = weights * np.exp(-rate * (slope - slope.min()))
                tried /= tried.sum()
                there = self.minimizer(tried, star)
                lower = float(self.validation_loss(there)[0])
                if lower <= value or rate < 1e-12:
                    break
                rate /= 2
            weights, star, value, rate = tried, there, lower, rate * 1.3
        return weights[0], value

    def convexity_violations(self) -> tuple[int, int]:
        """Return the number of chords of a grid on which F is not convex, and the number of all chords."""
        grid = simplex_grid(self.domains, GRID)
        first, second = np.triu_indices(len(grid), 1)
        values = self.outer(grid)
        middle = self.outer((grid[first] + grid[second]) / 2)
        above = middle - (values[first] + values[second]) / 2 > 1e-10
        return int(above.sum()), len(first)


def simplex_grid(domains: int, parts: int) -> Array:
    """Return all weights that are multiples of ``1 / parts``, shape ``(count, m)``.

    Example:
        >>> simplex_grid(2, 2).tolist()
        [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]
    """
    counts = [c for c in product(range(parts + 1), repeat=domains) if sum(c) == parts]
    return np.array(counts, dtype=np.float64) / parts


def unit(vectors: Array) -> Array:
    """Return vectors of the same directions and length one."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def norm(vectors: Array) -> float:
    """Return the largest length."""
    return float(np.linalg.norm(vectors, axis=-1).max())


def diameter(points: Array) -> float:
    """Return the largest distance of two points."""
    return norm((points[:, None] - points).reshape(-1, points.shape[-1]))
