"""Logistic regression with a ridge."""

from __future__ import annotations

import math
from typing import final

import numpy as np
from typing_extensions import override

from mixwell.lab.bounds.problems import Array, BilevelProblem, diameter, norm, unit
from mixwell.reference.theory import Constants


@final
class LogisticRegression(BilevelProblem):
    """``l_j(theta) = mean_i log(1 + exp(-y_i x_i theta)) + lambda ||theta||^2 / 2`` over the rows of domain j.

    The rows have length 2, and labels from a teacher per domain; the validation loss is that of rows with a
    teacher between them, without the ridge. Noise comes from drawing a few rows. F need not be convex; see
    :meth:`BilevelProblem.convexity_violations`.

    Args:
        domains: m.
        dimension: d.
        rows: rows of each domain, and of the validation set.
        ridge: lambda.
        draw: number of rows of a noisy gradient, drawn with replacement.
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
        teachers = unit(random.standard_normal((domains, dimension)))
        between = random.dirichlet(np.full(domains, 3.0)) @ teachers
        stretch = np.linspace(0.5, 1.5, dimension)

        def rows_of(teacher: Array) -> Array:
            inputs = 2 * unit(random.standard_normal((rows, dimension)) * stretch)
            labels = np.where(random.random(rows) < _sigmoid(3 * inputs @ teacher), 1.0, -1.0)
            return inputs * labels[:, None]

        self.signed = np.stack([rows_of(teacher) for teacher in teachers])
        """The rows ``y_i x_i`` of the domains, shape ``(m, rows, d)``."""
        self.validation_rows = rows_of(between)
        self.start = unit(random.standard_normal(dimension))
        self.noise_bound = 4.0  # two rows' gradients, each at most as long as the row, differ by at most this

    @override
    def gradients(self, theta: Array) -> Array:
        """``-mean_i y_i x_i sigmoid(-y_i x_i theta) + lambda theta``."""
        slopes = _sigmoid(-np.einsum("mnd,bd->bmn", self.signed, theta))
        data = np.einsum("bmn,mnd->bmd", slopes, self.signed) / self.signed.shape[1]
        return self.ridge * theta[:, None] - data

    @override
    def noisy_gradients(self, theta: Array, random: np.random.Generator) -> Array:
        chosen = random.integers(self.signed.shape[1], size=(len(theta), self.domains, self.draw))
        rows = self.signed[np.arange(self.domains)[:, None], chosen]
        slopes = _sigmoid(-np.einsum("bmnd,bd->bmn", rows, theta))
        return self.ridge * theta[:, None] - np.einsum("bmn,bmnd->bmd", slopes, rows) / self.draw

    @override
    def validation_gradient(self, theta: Array) -> Array:
        """``-mean_i y_i x_i sigmoid(-y_i x_i theta)``."""
        slopes = _sigmoid(-theta @ self.validation_rows.T)
        return -slopes @ self.validation_rows / len(self.validation_rows)

    @override
    def noisy_validation_gradient(self, theta: Array, random: np.random.Generator) -> Array:
        chosen = random.integers(len(self.validation_rows), size=(len(theta), self.draw))
        rows = self.validation_rows[chosen]
        slopes = _sigmoid(-np.einsum("bnd,bd->bn", rows, theta))
        return -np.einsum("bn,bnd->bd", slopes, rows) / self.draw

    @override
    def validation_loss(self, theta: Array) -> Array:
        """``mean_i log(1 + exp(-y_i x_i theta))``."""
        return np.logaddexp(0.0, -theta @ self.validation_rows.T).mean(-1)

    @override
    def minimizer(self, weights: Array, near: Array | None = None) -> Array:
        theta = np.zeros((len(weights), self.dimension)) if near is None else near.copy()
        for _ in range(50):
            slope = np.einsum("bm,bmd->bd", weights, self.gradients(theta))
            if np.abs(slope).max() < 1e-13:
                break
            theta = theta - np.linalg.solve(self.hessian(weights, theta), slope[..., None])[..., 0]
        return theta

    @override
    def hessian(self, weights: Array, theta: Array) -> Array:
        """``sum_j w_j mean_i s_i (1 - s_i) x_i x_i^T + lambda I``."""
        slopes = _sigmoid(-np.einsum("mnd,bd->bmn", self.signed, theta))
        factors = weights[..., None] * slopes * (1 - slopes) / self.signed.shape[1]
        data = np.einsum("bmn,mni,mnj->bij", factors, self.signed, self.signed, optimize=True)
        return data + self.ridge * np.eye(self.dimension)

    @override
    def diagonal_error(self) -> float:
        """``max_j || mean_i |x_i| |x_i|^T / 4 ||`` without its diagonal, as no ``s (1 - s)`` is above 1/4."""
        sizes = np.abs(self.signed)
        apart = np.einsum("mni,mnj->mij", sizes, sizes) / sizes.shape[1] / 4 * (1 - np.eye(self.dimension))
        return float(np.abs(np.linalg.eigvalsh(apart)).max())

    @override
    def base_constants(self, *, noisy: bool) -> Constants:
        """``mu = lambda``, ``L = lambda + max_j eig(X_j^T X_j / n) / 4``, and the ball around 0."""
        n = self.signed.shape[1]
        greatest = max(float(np.linalg.eigvalsh(rows.T @ rows / n)[-1]) for rows in self.signed)
        validation = self.validation_rows
        origin = np.zeros((1, self.dimension))
        noise = self.noise_bound if noisy else 0.0
        radius = max(norm(self.start), (norm(self.gradients(origin)[0]) + noise) / self.ridge)
        lengths = np.linalg.norm(self.signed, axis=-1)
        grid = np.eye(self.domains)
        uniform = np.full((1, self.domains), 1 / self.domains)
        # The gradient of a row is no longer than the row, with or without the ball.
        longest = max(float((lengths**2).mean(1).max()), float((validation**2).sum(-1).mean()))
        deviation = math.sqrt(longest / self.draw) if noisy else 0.0
        star = self.minimizer(uniform)
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
            spread=diameter(self.minimizer(grid)),
            start=norm(self.start - star[0]),
            noise=deviation,
        )


def _sigmoid(values: Array) -> Array:
    return 1 / (1 + np.exp(-values))
