"""Traces that differentiate the whole step, including the optimizer's moments and gradient clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters, inner_products
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces, empty_trace, full_products
from mixwell.typing import Gradients, Json, Vector


@final
class ForwardModeTraces(Traces):
    """Forward-mode differentiation of the real optimizer: ``z_j`` with the derivatives of its moments.

    A step with combined gradient G, clipping and an optimizer with state s is a function
    ``(theta, s) <- step(theta, s, G)``, and

        ``dG/dw_j = g_j - H z_j``,
        ``d clip(G) = c dG - c' G <G, dG> / |G|``,
        ``(z_j, ds_j) <- derivative of step``
        (:meth:`mixwell.hypergradient.responses.OptimizerResponse.differentiate_step`).

    With :class:`mixwell.ExactCurvature` this is the exact hypergradient of the round. It takes 2 (plain SGD),
    3 (momentum) or 4 (Adam) tensors per domain and parameter where dense traces take one. An exact derivative
    is not always a useful one: in the first steps of Adam, a coordinate with a combined gradient of nearly zero
    responds to the weights with up to ``1 / eps``, which low precision makes frequent.
    """

    def __repr__(self) -> str:
        return "ForwardModeTraces()"

    @override
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        self._parameters = parameters
        self._domains = domains
        self._step = step
        self._count = step.optimizer.moments
        step.optimizer.check_differentiable(self._count)
        self.z, self._source = (
            [[empty_trace(p) for p in parameters.tensors] for _ in range(domains)] for _ in range(2)
        )
        self._moments = [
            [[torch.zeros_like(z) for _ in range(self._count)] for z in trace] for trace in self.z
        ]

    @override
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        for tensor in self._tensors().values():
            tensor.zero_()

    @override
    def begin_step(self, step: StepModel) -> None:
        """``source_j = -H z_j`` for an approximate H."""
        step.optimizer.check_differentiable(self._count)
        self._step = step
        for trace, source in zip(self.z, self._source, strict=True):
            for index, (z, s) in enumerate(zip(trace, source, strict=True)):
                s.copy_(z).mul_(self._hessian(step, index)).neg_()

    @override
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """``source_j += scale * g_j``."""
        for source, gradient in zip(self._source[domain], gradients, strict=True):
            if gradient is not None:
                source.add_(gradient, alpha=scale)

    def add_product(self, domain: int, products: Gradients, scale: float) -> None:
        """``source_j -= scale * H_i z_j`` for an exact Hessian product with the loss of some domain i."""
        self.add(domain, products, -scale)

    @override
    def end_step(self, combined: Combined) -> None:
        """Differentiate clipping and the optimizer's step."""
        for domain in range(self._domains):
            source = self._source[domain]
            if combined.clip < 1 and combined.norm:
                along = sum(inner_products(combined.gradients, source)) / combined.clip
                # 1e-6 is that of torch.nn.utils.clip_grad_norm_.
                pulled = along / (combined.norm * (combined.norm + 1e-6))
                for s, g in zip(source, combined.gradients, strict=True):
                    s.mul_(combined.clip)
                    if g is not None:
                        s.sub_(g, alpha=pulled)
            for index, gradient in enumerate(combined.gradients):
                if gradient is None:
                    continue  # the optimizer does not change this parameter
                self._step.optimizer.differentiate_step(
                    index,
                    gradient.to(source[index].dtype),
                    source[index],
                    self.z[domain][index],
                    self._moments[domain][index],
                )

    @override
    def dot(self, vector: Gradients) -> Vector:
        return full_products(self._parameters, vector, self.z, [1.0] * len(self._parameters))

    @property
    @override
    def nbytes(self) -> int:
        return sum(distributed.to_local(tensor).nbytes for tensor in self._tensors().values())

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        # The sources are those of one step, and a state is taken between steps.
        return {}, {name: t for name, t in self._tensors().items() if not name.startswith("source.")}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            if name in tensors:
                tensor.copy_(distributed.distribute_like(tensors[name], tensor))

    def _hessian(self, step: StepModel, index: int) -> float | Tensor:
        """Return the curvature as a part of H: the coefficient stands for ``P H``, so it is divided by P."""
        coefficient, response = step.curvature[index], step.responses[index]
        if coefficient and not response.elementwise:
            raise ValueError(
                "ForwardModeTraces cannot divide a curvature by a preconditioner that is not diagonal; use "
                "ExactCurvature(), a curvature of 0, or DenseTraces()"
            )
        if response.diagonal is None:
            return coefficient
        # Where P is zero, the parameter has had no gradient yet, and its trace is zero.
        return torch.where(response.diagonal > 0, coefficient / response.diagonal, 0.0)

    def _tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for domain in range(self._domains):
            for index, name in enumerate(self._parameters.names):
                named[f"z.{domain}.{name}"] = self.z[domain][index]
                named[f"source.{domain}.{name}"] = self._source[domain][index]
                for k, moment in enumerate(self._moments[domain][index]):
                    named[f"moment{k}.{domain}.{name}"] = moment
        return named
