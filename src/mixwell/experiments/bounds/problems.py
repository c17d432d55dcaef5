"""Strongly convex bilevel problems whose constants are computed, not guessed.

Both kinds live on a ball that no run leaves. Around any centre z, the map ``theta -> theta - eta g`` with
``eta <= 1/L`` contracts by ``1 - eta mu`` and moves z by at most ``eta s``, where ``s = max_j ||grad
l_j(z)|| + noise``; so the ball of radius ``max(||theta_0 - z||, s / mu)`` is mapped into itself. The
Lipschitz constants are those of that ball.

All methods work on rows: ``theta`` has the shape ``(rows, d)`` and ``weights`` ``(rows, m)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.theory import Constants

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
CURVATURES = ("isotropic", "diagonal", "exact")
GRID = 12


class BilevelProblem(ABC):
    """Domains, a validation loss, and everything that the theorems want to know of them.

    Attributes:
        name: of the kind and seed.
        domains: m.
        dimension: d.
        start: theta_0, shape ``(d,)``.
        noise_bound: no noisy gradient is farther than this from the gradient.
    """

    name: str
    domains: int
    dimension: int
    start: Array
    noise_bound: float

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """The domains' gradients, shape ``(rows, m, d)``."""

    @abstractmethod
    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        """Unbiased, noisy versions of :meth:`gradients`."""

    @abstractmethod
    def validation_gradient(self, theta: Array) -> Array:
        """The gradient of the validation loss, shape ``(rows, d)``."""

    @abstractmethod
    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        """An unbiased, noisy version of :meth:`validation_gradient`."""

    @abstractmethod
    def validation_loss(self, theta: Array) -> Array:
        """Shape ``(rows,)``."""

    @abstractmethod
    def minimiser(self, weights: Array, near: Array | None = None) -> Array:
        """``theta*(w)``, shape ``(rows, d)``; ``near`` is a guess, where there is one."""

    @abstractmethod
    def hessian(self, weights: Array, theta: Array) -> Array:
        """The Hessian of the weighted loss, shape ``(rows, d, d)``."""

    @abstractmethod
    def base_constants(self, *, noisy: bool) -> Constants:
        """The constants for the exact Hessian at the optimum."""

    @abstractmethod
    def diagonal_error(self) -> float:
        """A bound of how far the diagonal of the Hessian is from it, in operator norm, for all weights."""

    def greatest_gap(self) -> float:
        """``max_w F(w) - F*`` on a grid of weights: a bound above it says nothing."""
        return float(self.outer(simplex_grid(self.domains, GRID)).max()) - self.best()[1]

    def outer(self, weights: Array) -> Array:
        """``F(w) = L_V(theta*(w))``, shape ``(rows,)``."""
        return self.validation_loss(self.minimiser(weights))

    def hypergradient(self, weights: Array, theta: Array | None = None) -> Array:
        """The true one, ``-<grad L_V, H^-1 grad l_j>`` at the minimiser (Eq. 2), shape ``(rows, m)``."""
        star = self.minimiser(weights) if theta is None else theta
        target = np.linalg.solve(self.hessian(weights, star), self.validation_gradient(star)[..., None])
        return -(self.gradients(star) @ target)[..., 0]

    def curvature(self, kind: str, weights: Array, theta: Array) -> Array:
        """The H that a round uses, as full matrices, shape ``(rows, d, d)``.

        Args:
            kind: ``"exact"``, the Hessian at the minimiser; its ``"diagonal"``; or ``"isotropic"``, gamma I with
                gamma midway between mu and L.
            weights: of the round.
            theta: the minimiser for them.

        Returns:
            H.
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
        """The theorem's constants for a kind of curvature.

        All curvatures have eigenvalues between mu and L (a diagonal entry of a matrix is between its extreme
        eigenvalues), and ``gamma I`` with gamma midway is at most ``(L - mu) / 2`` from any of them.

        Args:
            kind: of :data:`CURVATURES`.
            noisy: whether the gradients are.

        Returns:
            The constants.
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
        """``max_w max_j |dF/dw_j|`` on a grid of weights: the size that ``G G_V / mu_hat`` bounds."""
        return float(np.abs(self.hypergradient(simplex_grid(self.domains, GRID))).max())

    def best(self, *, gap: float = 1e-8, steps: int = 5_000) -> tuple[Array, float]:
        """The weights that minimise F, by mirror descent with true hypergradients.

        For convex F, ``F(w) - F* <= <grad F, w> - min_j dF/dw_j``; it stops where that is small.

        Args:
            gap: to stop at.
            steps: at most.

        Returns:
            The weights, shape ``(m,)``, and ``F*``.
        """
        weights = np.full((1, self.domains), 1 / self.domains)
        star = self.minimiser(weights)
        value, rate = float(self.validation_loss(star)[0]), 1.0 / self.greatest_hypergradient()
        for _ in range(steps):
            slope = self.hypergradient(weights, star)
            if float((slope * weights).sum() - slope.min()) < gap:
                break
            while True:
                tried = weights * np.exp(-rate * (slope - slope.min()))
                tried /= tried.sum()
                there = self.minimiser(tried, star)
                lower = float(self.validation_loss(there)[0])
                if lower <= value or rate < 1e-12:
                    break
                rate /= 2
            weights, star, value, rate = tried, there, lower, rate * 1.3
        return weights[0], value

    def convexity_violations(self) -> tuple[int, int]:
        """On how many chords of a grid the middle of F is above the mean of its ends, and of how many."""
        grid = simplex_grid(self.domains, GRID)
        first, second = np.triu_indices(len(grid), 1)
        values = self.outer(grid)
        middle = self.outer((grid[first] + grid[second]) / 2)
        above = middle - (values[first] + values[second]) / 2 > 1e-10
        return int(above.sum()), len(first)


@final
class SharedQuadratics(BilevelProblem):
    """``l_j = (theta - c_j)^T A (theta - c_j) / 2`` with one A.

    So ``theta*(w) = sum_j w_j c_j``, and F is convex. The eigenvalues of A go from 1 to ``condition``. The
    validation loss is a quadratic with a Hessian of its own, whose minimum no mixture reaches, so the
    hypergradients do not vanish at the best weights. Noise is uniform on a sphere of radius sigma, so its
    variance is ``sigma^2`` and it is bounded.

    Args:
        seed: of everything.
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
        self.centers = _unit(random.standard_normal((domains, dimension)))
        mixture = random.dirichlet(np.full(domains, 3.0))
        self.target = mixture @ self.centers + _unit(random.standard_normal(dimension))
        self.start = self.centers.mean(0) + _unit(random.standard_normal(dimension))

    def gradients(self, theta: Array) -> Array:
        """``A (theta - c_j)``."""
        return (theta[:, None] - self.centers) @ self.matrix

    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        """With a vector of length sigma in a random direction."""
        exact = self.gradients(theta)
        return exact + self.noise_bound * _unit(random.standard_normal(exact.shape))

    def validation_gradient(self, theta: Array) -> Array:
        """``A_V (theta - c_V)``."""
        return (theta - self.target) @ self.validation_matrix

    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        """With a vector of length sigma in a random direction."""
        exact = self.validation_gradient(theta)
        return exact + self.noise_bound * _unit(random.standard_normal(exact.shape))

    def validation_loss(self, theta: Array) -> Array:
        """``(theta - c_V)^T A_V (theta - c_V) / 2``."""
        return ((theta - self.target) * self.validation_gradient(theta)).sum(-1) / 2

    def minimiser(self, weights: Array, near: Array | None = None) -> Array:
        """``sum_j w_j c_j``."""
        return weights @ self.centers

    def hessian(self, weights: Array, theta: Array) -> Array:
        """A."""
        return np.broadcast_to(self.matrix, (len(weights), self.dimension, self.dimension))

    def diagonal_error(self) -> float:
        """``||A - diag A||``."""
        return float(np.abs(np.linalg.eigvalsh(self.matrix * (1 - np.eye(self.dimension)))).max())

    def base_constants(self, *, noisy: bool) -> Constants:
        """From the eigenvalues of A and A_V, and the ball around the mean of the centres."""
        values = np.linalg.eigvalsh(self.matrix)
        mu, smooth = float(values[0]), float(values[-1])
        middle = self.centers.mean(0)
        at_middle = _norm(self.gradients(middle[None])[0])
        noise = self.noise_bound if noisy else 0.0
        radius = max(_norm(self.start - middle), (at_middle + noise) / mu)
        validation_smooth = float(np.linalg.eigvalsh(self.validation_matrix)[-1])
        at_target = _norm(self.validation_gradient(middle[None]))
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
            spread=_spread(self.centers),
            start=_norm(self.start - middle),
            noise=noise,
        )


@final
class LogisticRegression(BilevelProblem):
    """``l_j(theta) = mean_i log(1 + exp(-y_i x_i theta)) + lambda ||theta||^2 / 2`` over the rows of domain j.

    The rows have length 2 and labels from a teacher of the domain's own; the validation loss is that of
    rows with a teacher between them, without the ridge. Noise is that of drawing a few rows. F need not be
    convex; :meth:`BilevelProblem.convexity_violations` tells.

    Args:
        seed: of everything.
        domains: m.
        dimension: d.
        rows: of each domain, and of the validation set.
        ridge: lambda.
        draw: the number of rows of a noisy gradient, drawn with replacement.
    """

    def __init__(
        self,
        seed: int,
        *,
        domains: int = 3,
        dimension: int = 4,
        rows: int = 60,
        ridge: float = 0.25,
        draw: int = 8,
    ) -> None:
        random = np.random.default_rng(seed)
        self.name = f"logistic-{seed}"
        self.domains, self.dimension, self.ridge, self.draw = domains, dimension, ridge, draw
        teachers = _unit(random.standard_normal((domains, dimension)))
        between = random.dirichlet(np.full(domains, 3.0)) @ teachers
        stretch = np.linspace(0.5, 1.5, dimension)

        def rows_of(teacher: Array) -> Array:
            inputs = 2 * _unit(random.standard_normal((rows, dimension)) * stretch)
            labels = np.where(random.random(rows) < _sigmoid(3 * inputs @ teacher), 1.0, -1.0)
            return inputs * labels[:, None]

        self.signed = np.stack([rows_of(teacher) for teacher in teachers])
        """The rows ``y_i x_i`` of the domains, shape ``(m, rows, d)``."""
        self.validation_rows = rows_of(between)
        self.start = _unit(random.standard_normal(dimension))
        self.noise_bound = 4.0  # two rows' gradients, each no longer than the row, differ by no more

    def gradients(self, theta: Array) -> Array:
        """``-mean_i y_i x_i sigmoid(-y_i x_i theta) + lambda theta``."""
        slopes = _sigmoid(-np.einsum("mnd,bd->bmn", self.signed, theta))
        data = np.einsum("bmn,mnd->bmd", slopes, self.signed) / self.signed.shape[1]
        return self.ridge * theta[:, None] - data

    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        """Of a few rows of each domain."""
        chosen = random.integers(self.signed.shape[1], size=(len(theta), self.domains, self.draw))
        rows = self.signed[np.arange(self.domains)[:, None], chosen]
        slopes = _sigmoid(-np.einsum("bmnd,bd->bmn", rows, theta))
        return self.ridge * theta[:, None] - np.einsum("bmn,bmnd->bmd", slopes, rows) / self.draw

    def validation_gradient(self, theta: Array) -> Array:
        """``-mean_i y_i x_i sigmoid(-y_i x_i theta)``."""
        slopes = _sigmoid(-theta @ self.validation_rows.T)
        return -slopes @ self.validation_rows / len(self.validation_rows)

    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        """Of a few rows."""
        chosen = random.integers(len(self.validation_rows), size=(len(theta), self.draw))
        rows = self.validation_rows[chosen]
        slopes = _sigmoid(-np.einsum("bnd,bd->bn", rows, theta))
        return -np.einsum("bn,bnd->bd", slopes, rows) / self.draw

    def validation_loss(self, theta: Array) -> Array:
        """``mean_i log(1 + exp(-y_i x_i theta))``."""
        return np.logaddexp(0.0, -theta @ self.validation_rows.T).mean(-1)

    def minimiser(self, weights: Array, near: Array | None = None) -> Array:
        """By Newton's method, to rounding error."""
        theta = np.zeros((len(weights), self.dimension)) if near is None else near.copy()
        for _ in range(50):
            slope = np.einsum("bm,bmd->bd", weights, self.gradients(theta))
            if np.abs(slope).max() < 1e-13:
                break
            theta = theta - np.linalg.solve(self.hessian(weights, theta), slope[..., None])[..., 0]
        return theta

    def hessian(self, weights: Array, theta: Array) -> Array:
        """``sum_j w_j mean_i s_i (1 - s_i) x_i x_i^T + lambda I``."""
        slopes = _sigmoid(-np.einsum("mnd,bd->bmn", self.signed, theta))
        spread = weights[..., None] * slopes * (1 - slopes) / self.signed.shape[1]
        data = np.einsum("bmn,mni,mnj->bij", spread, self.signed, self.signed, optimize=True)
        return data + self.ridge * np.eye(self.dimension)

    def diagonal_error(self) -> float:
        """``max_j || mean_i |x_i| |x_i|^T / 4 ||`` without its diagonal, as no ``s (1 - s)`` is above 1/4."""
        sizes = np.abs(self.signed)
        apart = np.einsum("mni,mnj->mij", sizes, sizes) / sizes.shape[1] / 4 * (1 - np.eye(self.dimension))
        return float(np.abs(np.linalg.eigvalsh(apart)).max())

    def base_constants(self, *, noisy: bool) -> Constants:
        """``mu = lambda``, ``L = lambda + max_j eig(X_j^T X_j / n) / 4``, and the ball around 0."""
        n = self.signed.shape[1]
        greatest = max(float(np.linalg.eigvalsh(rows.T @ rows / n)[-1]) for rows in self.signed)
        validation = self.validation_rows
        origin = np.zeros((1, self.dimension))
        noise = self.noise_bound if noisy else 0.0
        radius = max(_norm(self.start), (_norm(self.gradients(origin)[0]) + noise) / self.ridge)
        lengths = np.linalg.norm(self.signed, axis=-1)
        grid = np.eye(self.domains)
        uniform = np.full((1, self.domains), 1 / self.domains)
        # The gradient of a row is no longer than the row, with or without the ball.
        longest = max(float((lengths**2).mean(1).max()), float((validation**2).sum(-1).mean()))
        deviation = math.sqrt(longest / self.draw) if noisy else 0.0
        star = self.minimiser(uniform)
        return Constants(
            domains=self.domains,
            gradient=float(lengths.mean(1).max()) + self.ridge * radius,
            smoothness=self.ridge + greatest / 4,
            strong_convexity=self.ridge,
            validation_gradient=float(np.linalg.norm(validation, axis=-1).mean()),
            validation_smoothness=float(np.linalg.eigvalsh(validation.T @ validation / len(validation))[-1])
            / 4,
            least_curvature=self.ridge,
            greatest_curvature=self.ridge + greatest / 4,
            curvature_error=0.0,
            spread=_spread(self.minimiser(grid)),
            start=_norm(self.start - star[0]),
            noise=deviation,
        )


KINDS: dict[str, Callable[[int], BilevelProblem]] = {
    "quadratic": partial(SharedQuadratics, condition=4.0, noise=1.0),
    "steep quadratic": partial(SharedQuadratics, condition=10.0),
    "noisy quadratic": partial(SharedQuadratics, condition=1.25, noise=3.0),
    "logistic": LogisticRegression,
}
"""Problems by name, from a seed."""


def simplex_grid(domains: int, parts: int) -> Array:
    """All weights that are multiples of ``1 / parts``.

    Args:
        domains: m.
        parts: of the unit.

    Returns:
        Shape ``(count, m)``.

    Example:
        >>> simplex_grid(2, 2).tolist()
        [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]
    """
    counts = [c for c in product(range(parts + 1), repeat=domains) if sum(c) == parts]
    return np.array(counts, dtype=np.float64) / parts


def _orthogonal(random: np.random.Generator, dimension: int) -> Array:
    return np.linalg.qr(random.standard_normal((dimension, dimension)))[0]


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _norm(vectors: Array) -> float:
    """The greatest length."""
    return float(np.linalg.norm(vectors, axis=-1).max())


def _spread(points: Array) -> float:
    return _norm((points[:, None] - points).reshape(-1, points.shape[-1]))


def _sigmoid(values: Array) -> Array:
    return 1 / (1 + np.exp(-values))
