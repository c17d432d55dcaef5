"""Traces as full tensors, one per domain and parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from mixwell.parameters import Gradients, Parameters, inner_products
from mixwell.traces.base import Json, StepModel, Traces
from mixwell.weights import Vector

# Below this the scalar that stands for the decay is multiplied into the tensors, long before they overflow.
SMALLEST_SCALE = 1e-6


class FoldedTraces(Traces):
    """``z_j <- shrink * z_j + rate * P g_j``, one stored tensor per domain and parameter.

    A decay that is the same number for a whole tensor is not applied to it but kept in one scalar per
    parameter, shared by all domains: ``z = scale * stored``. So a step reads and writes each trace once, when
    its gradient is added.
    """

    def allocate(self, parameters: Parameters, domains: int) -> None:
        """Take ``m`` times the parameters' memory.

        Args:
            parameters: what is trained.
            domains: the number m.
        """
        self._parameters = parameters
        self._stored = [[self._zeros(p) for p in parameters.tensors] for _ in range(domains)]
        self._scale = [1.0] * len(parameters)
        self._step: StepModel | None = None

    def reset(self, round_index: int) -> None:
        """Set all traces to zero.

        Args:
            round_index: not used.
        """
        for trace in self._stored:
            for stored in trace:
                stored.zero_()
        self._scale = [1.0] * len(self._parameters)

    def begin_step(self, step: StepModel) -> None:
        """Fade all traces.

        Args:
            step: what the step does.
        """
        self._step = step
        for index in range(len(self._parameters)):
            shrink = step.shrink(index)
            if not isinstance(shrink, Tensor) and shrink > 0:
                self._scale[index] *= shrink
                if self._scale[index] >= SMALLEST_SCALE:
                    continue
                shrink = 1.0
            factor = shrink * self._scale[index]
            for trace in self._stored:
                trace[index].mul_(factor)
            self._scale[index] = 1.0

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """``stored_j += rate * scale * P g_j / decay``.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        assert self._step is not None
        for index, gradient in enumerate(gradients):
            rate = self._step.rate(index) * scale / self._scale[index]
            if gradient is not None and rate:
                response = self._step.responses[index]
                self._accumulate(self._stored[domain][index], response.precondition(gradient), rate)

    def dot(self, vector: Gradients) -> Vector:
        """``<vector, z_j>``.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        return np.array([np.dot(inner_products(vector, trace), self._scale) for trace in self._stored])

    @property
    def nbytes(self) -> int:
        """The memory of all stored tensors."""
        return sum(stored.nbytes for trace in self._stored for stored in trace)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The stored tensors and their scalars."""
        tensors = {
            f"{domain}.{name}": stored
            for domain, trace in enumerate(self._stored)
            for name, stored in zip(self._parameters.names, trace, strict=True)
        }
        return {"scale": list(self._scale)}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up tensors and scalars.

        Args:
            values: the scalars.
            tensors: the traces.
        """
        self._scale = [float(s) for s in cast("list[float]", values["scale"])]
        for domain, trace in enumerate(self._stored):
            for name, stored in zip(self._parameters.names, trace, strict=True):
                stored.copy_(tensors[f"{domain}.{name}"])

    @abstractmethod
    def _zeros(self, parameter: Tensor) -> Tensor:
        """The empty trace of a parameter."""

    @abstractmethod
    def _accumulate(self, stored: Tensor, gradient: Tensor, rate: float) -> None:
        """``stored += rate * gradient``."""


@final
class DenseTraces(FoldedTraces):
    """Traces in float32 (float64 for float64 parameters): exact up to rounding, m times the parameters."""

    def __repr__(self) -> str:
        return "DenseTraces()"

    def _zeros(self, parameter: Tensor) -> Tensor:
        kind = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros_like(parameter, dtype=kind, requires_grad=False)

    def _accumulate(self, stored: Tensor, gradient: Tensor, rate: float) -> None:
        stored.add_(gradient, alpha=rate)
