"""Traces that differentiate the whole step, the optimizer's moments and gradient clipping included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters, inner_products, own_products
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces, empty_trace
from mixwell.typing import Gradients, Json, Vector


@final
class ForwardModeTraces(Traces):
    """Forward-mode differentiation of the real optimizer: ``z_j`` with the derivatives of its moments.

    A step with combined gradient G, clipping and an optimizer with state s is a function
    ``(theta, s) <- step(theta, s, G)``, and

        ``dG/dw_j = g_j - H z_j``,
        ``d clip(G) = c dG - c' G <G, dG> / |G|``,
        ``(z_j, ds_j) <- derivative of step`` (:meth:`mixwell.hypergradient.responses.OptimizerModel.advance`).

    With :class:`mixwell.ExactCurvature` this is the exact hypergradient of the round. It takes 2 (plain SGD),
    3 (momentum) or 4 (Adam) tensors per domain and parameter where dense traces take one. An exact derivative
    is not always a useful one: in the first steps of Adam, a coordinate whose combined gradient is nearly zero
    answers to the weights with up to ``1 / eps``, which low precision makes frequent.
    """

    def __repr__(self) -> str:
        return "ForwardModeTraces()"

    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Take the memory of traces, pending gradients and derivatives of moments.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does.
        """
        self._parameters = parameters
        self._domains = domains
        self._step = step
        self._count = step.optimizer.moments
        step.optimizer.check_advance(self._count)
        self.z, self._source = (
            [[empty_trace(p) for p in parameters.tensors] for _ in range(domains)] for _ in range(2)
        )
        self._moments = [
            [[torch.zeros_like(z) for _ in range(self._count)] for z in trace] for trace in self.z
        ]

    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces and derivatives of moments to zero.

        Args:
            round_index: not used.
            validation: not used.
        """
        for tensors in (*self.z, *self._source, *(k for domain in self._moments for k in domain)):
            for tensor in tensors:
                tensor.zero_()

    def begin_step(self, step: StepModel) -> None:
        """``source_j = -H z_j`` for an approximate H.

        Args:
            step: what the step does.
        """
        step.optimizer.check_advance(self._count)
        self._step = step
        for trace, source in zip(self.z, self._source, strict=True):
            for index, (z, s) in enumerate(zip(trace, source, strict=True)):
                s.copy_(z).mul_(self._hessian(step, index)).neg_()

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """``source_j += scale * g_j``.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        for source, gradient in zip(self._source[domain], gradients, strict=True):
            if gradient is not None:
                source.add_(gradient, alpha=scale)

    def add_product(self, domain: int, products: Gradients, scale: float) -> None:
        """``source_j -= scale * H z_j`` for an exact Hessian product.

        Args:
            domain: whose trace was multiplied.
            products: ``H_i z_j`` of some domain i's loss.
            scale: the factor of that loss.
        """
        self.add(domain, products, -scale)

    def end_step(self, combined: Combined) -> None:
        """Differentiate clipping and the optimizer's step.

        Args:
            combined: what the optimizer is about to be given.
        """
        for domain in range(self._domains):
            source = self._source[domain]
            if combined.clip < 1 and combined.norm:
                along = sum(inner_products(combined.gradients, source)) / combined.clip
                pulled = along / (combined.norm * (combined.norm + 1e-6))
                for s, g in zip(source, combined.gradients, strict=True):
                    s.mul_(combined.clip)
                    if g is not None:
                        s.sub_(g, alpha=pulled)
            for index, gradient in enumerate(combined.gradients):
                if gradient is None:
                    continue  # the optimizer leaves this parameter alone
                self._step.optimizer.advance(
                    index,
                    gradient.to(source[index].dtype),
                    source[index],
                    self.z[domain][index],
                    self._moments[domain][index],
                )

    def dot(self, vector: Gradients) -> Vector:
        """``<vector, z_j>``: what the processes have of it, added up.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        shares = [distributed.replication_weight(p) for p in self._parameters.tensors]
        own = np.array([np.dot(own_products(vector, trace), shares) for trace in self.z])
        return distributed.all_reduce_sum(own, self._parameters.device)

    @property
    def nbytes(self) -> int:
        """The memory of all tensors."""
        return sum(distributed.to_local(tensor).nbytes for tensor in self._all().values())

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """All traces and the derivatives of the moments."""
        return {}, {name: t for name, t in self._all().items() if not name.startswith("source.")}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: none.
            tensors: the tensors.
        """
        for name, tensor in self._all().items():
            if name in tensors:
                tensor.copy_(distributed.distribute_like(tensors[name], tensor))

    def _hessian(self, step: StepModel, index: int) -> float | Tensor:
        """The coefficient as a part of H: a number stands for ``P H``, so it is divided by P."""
        coefficient, scale = step.curvature[index], step.responses[index].scale
        if isinstance(coefficient, Tensor) or scale is None:
            return coefficient
        return coefficient / scale

    def _all(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for domain in range(self._domains):
            for index, name in enumerate(self._parameters.names):
                named[f"z.{domain}.{name}"] = self.z[domain][index]
                named[f"source.{domain}.{name}"] = self._source[domain][index]
                for k, moment in enumerate(self._moments[domain][index]):
                    named[f"moment{k}.{domain}.{name}"] = moment
        return named
