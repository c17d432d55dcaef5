"""Quadratic problems, for which minimizers and hypergradients have a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from mixwell.reference.unroll import Problem


@final
@dataclass(frozen=True)
class Quadratic:
    """``l_j(theta) = (theta - c_j)^T A_j (theta - c_j) / 2`` and ``L_V`` likewise with A_V and c_V.

    Args:
        hessians: the A_j, symmetric positive definite, shape ``(m, d, d)``.
        centers: the c_j, shape ``(m, d)``.
        validation_hessian: A_V, shape ``(d, d)``.
        validation_center: c_V, shape ``(d,)``.
    """

    hessians: Tensor
    centers: Tensor
    validation_hessian: Tensor
    validation_center: Tensor

    @classmethod
    def random(cls, *, domains: int, dimension: int, seed: int, condition: float = 10.0) -> Quadratic:
        """Return a random strongly convex problem in float64 with curvatures between 1 and ``condition``."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def hessian() -> Tensor:
            basis = torch.linalg.qr(normal(dimension, dimension)).Q
            spread = torch.rand(dimension, generator=generator, dtype=torch.float64)
            return basis @ torch.diag(1 + (condition - 1) * spread) @ basis.T

        return cls(
            torch.stack([hessian() for _ in range(domains)]),
            normal(domains, dimension),
            hessian(),
            normal(dimension),
        )

    def problem(self) -> Problem:
        """Return the same problem for the functions of :mod:`mixwell.reference.unroll`."""

        def losses(theta: Tensor, t: int) -> Tensor:
            away = theta - self.centers
            return torch.einsum("mi,mij,mj->m", away, self.hessians, away) / 2

        def validation(theta: Tensor) -> Tensor:
            away = theta - self.validation_center
            return away @ self.validation_hessian @ away / 2

        return Problem(losses, validation)

    def hessian(self, weights: Tensor) -> Tensor:
        """Return ``sum_j w_j A_j``, shape ``(d, d)``."""
        return torch.einsum("m,mij->ij", weights, self.hessians)

    def minimizer(self, weights: Tensor) -> Tensor:
        """Return ``theta*(w) = (sum_j w_j A_j)^-1 sum_j w_j A_j c_j``, shape ``(d,)``."""
        pull = torch.einsum("m,mij,mj->i", weights, self.hessians, self.centers)
        return torch.linalg.solve(self.hessian(weights), pull)

    def implicit(self, weights: Tensor) -> Tensor:
        """Return the minimizer's hypergradient ``-<A_V (theta* - c_V), H^-1 A_j (theta* - c_j)>`` (Eq. 2)."""
        theta = self.minimizer(weights)
        target = self.validation_hessian @ (theta - self.validation_center)
        gradients = torch.einsum("mij,mj->mi", self.hessians, theta - self.centers)
        return -gradients @ torch.linalg.solve(self.hessian(weights), target)

    def unrolled(self, theta: Tensor, weights: Tensor, *, learning_rate: float, horizon: int) -> Tensor:
        """Return the exact T-step hypergradient in closed form, without a loop over T, shape ``(m,)``.

        In the eigenbasis Q of H with ``r_a = 1 - eta lambda_a``, ``y = Q^T (theta_0 - theta*)``,
        ``B_j = Q^T A_j Q`` and ``b_j = Q^T A_j (theta* - c_j)``:

            ``[Q^T u_j]_a = sum_b B_ab y_b (r_a^T - r_b^T) / (r_a - r_b) + b_a (1 - r_a^T) / (1 - r_a)``

        (``T r_a^(T-1)`` in place of the quotient where the two are equal), and ``h_j = -eta <grad L_V, u_j>``.
        ``theta`` is ``theta_0``, ``learning_rate`` eta and ``horizon`` T.
        """
        values, basis = torch.linalg.eigh(self.hessian(weights))
        ratio = 1 - learning_rate * values
        power = ratio**horizon
        star = self.minimizer(weights)
        start = basis.T @ (theta - star)
        gap = ratio[:, None] - ratio[None, :]
        # The quotient of two small differences would lose all digits.
        near = gap.abs() < 1e-9
        same = horizon * ((ratio[:, None] + ratio[None, :]) / 2) ** (horizon - 1)
        quotient = torch.where(
            near, same, (power[:, None] - power[None, :]) / torch.where(near, torch.ones_like(gap), gap)
        )
        turned = torch.einsum("ia,mij,jb->mab", basis, self.hessians, basis)
        offsets = torch.einsum("ia,mij,mj->ma", basis, self.hessians, star - self.centers)
        traces = torch.einsum("mab,ab,b->ma", turned, quotient, start) + offsets * (1 - power) / (1 - ratio)
        end = star + basis @ (power * start)
        target = basis.T @ (self.validation_hessian @ (end - self.validation_center))
        return -learning_rate * traces @ target
