"""The interface of every kind of traces, and their registry.

A trace follows ``z_j <- shrink * z_j + rate * P (g_j - a_j G)`` with ``shrink = 1 - eta lambda - eta P H`` and
``rate = eta c``, where c is the factor of gradient clipping and ``a_j G`` the part of ``g_j`` along the combined
gradient that clipping takes away (:mod:`mixwell.hypergradient.traces.clipping`); :class:`StepModel` has the
factors of one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters, local_products
from mixwell.hypergradient.responses import OptimizerResponse, StepResponse
from mixwell.typing import Gradients, Json, Vector
from mixwell.utils.registry import Registry
from mixwell.utils.sections import ConfigSection


@final
@dataclass(frozen=True)
class StepModel:
    """The effect of a training step on a trace, as far as it is known before the step.

    Args:
        responses: the response of each parameter to a gradient.
        curvature: the coefficient of each parameter.
        clip: the factor by which clipping shortened the last combined gradient.
        remaining: steps until the end of the round, including this one.
        interval: the number of steps that this one stands for, where only every s-th is traced.
        indices: the positions of these parameters among the optimizer's; ``None`` for all.
    """

    optimizer: OptimizerResponse
    responses: Sequence[StepResponse]
    curvature: Sequence[float]
    clip: float = 1.0
    remaining: int = 1
    interval: int = 1
    indices: Sequence[int] | None = None

    def shrink(self, index: int) -> float | Tensor:
        """Return the factor of the old trace of a parameter: ``1 - eta lambda - eta P H``."""
        return self.responses[index].shrink(self.curvature[index], clip=self.clip)

    def scalar_shrinks(self, indices: Sequence[int]) -> list[float] | None:
        """Return the factors of some parameters, ``None`` where one differs from element to element.

        It does where P multiplies the weight decay (Adam, not AdamW).
        """
        # Before its first step an optimizer has no P, and the factor would still be a number.
        if self.optimizer.preconditions and any(self.responses[i].coupled for i in indices):
            return None
        shrinks = [self.shrink(i) for i in indices]
        numbers = [float(shrink) for shrink in shrinks if not isinstance(shrink, Tensor)]
        return numbers if len(numbers) == len(shrinks) else None

    def rate(self, index: int) -> float:
        """Return eta s with clipping, the factor of a new gradient before the preconditioner."""
        return self.responses[index].rate * self.clip * self.interval

    def precondition_adjoint(self, index: int, vector: Tensor) -> Tensor:
        """Return ``P^T v`` with the current P: the optimizer may have stepped or been loaded since."""
        return self.optimizer.response(self._position(index), remaining=1).precondition_adjoint(vector)

    def separable_scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return r and c with the current ``P ~ r c^T`` (:meth:`OptimizerResponse.separable_scales`)."""
        return self.optimizer.separable_scales(self._position(index))

    def diagonal(self, index: int) -> Tensor | None:
        """Return the diagonal of the current P; ``None`` for the identity, or where P is not elementwise."""
        return self.optimizer.response(self._position(index), remaining=1).diagonal

    def _position(self, index: int) -> int:
        return index if self.indices is None else self.indices[index]

    def subset(self, indices: Sequence[int]) -> StepModel:
        """Return the step model of some of the parameters."""
        return replace(
            self,
            responses=[self.responses[i] for i in indices],
            curvature=[self.curvature[i] for i in indices],
            indices=[i if self.indices is None else self.indices[i] for i in indices],
        )


@final
@dataclass(frozen=True)
class Combined:
    """The combined gradient that the optimizer is about to receive.

    Args:
        gradients: after clipping.
        clip: the factor of clipping, 1 where nothing was clipped.
        norm: the norm before clipping, where it was computed.
        auxiliary: the part of auxiliary losses in the gradient of mixed batches, before clipping, where there is
            any. It does not depend on the weights.
        clip_on_device: the factor of clipping as a tensor on an accelerator, in place of ``clip``.
        norm_on_device: the norm on an accelerator, in place of ``norm``.
    """

    gradients: Gradients
    clip: float = 1.0
    norm: float | None = None
    auxiliary: Gradients | None = None
    clip_on_device: Tensor | None = None
    norm_on_device: Tensor | None = None

    @classmethod
    def of(
        cls,
        gradients: Gradients,
        norm: Tensor | None,
        limit: float | None,
        auxiliary: Gradients | None,
        *,
        at_once: bool,
    ) -> Combined:
        """Return the combined gradient, which was clipped to the norm ``limit`` if there is one.

        Args:
            norm: before clipping, where it was computed.
            at_once: whether the norm may be waited for.
        """
        if norm is None or limit is None:
            return cls(gradients, 1.0, None if norm is None or not at_once else float(norm), auxiliary)
        # As torch.nn.utils.clip_grad_norm_ has it.
        if at_once:
            return cls(gradients, min(1.0, limit / (float(norm) + 1e-6)), float(norm), auxiliary)
        return cls(gradients, 1.0, None, auxiliary, (limit / (norm + 1e-6)).clamp(max=1.0), norm)

    def on_host(self) -> Combined:
        """Return the same with numbers in place of tensors on an accelerator, which is waited for."""
        if self.clip_on_device is None or self.norm_on_device is None:
            return self
        clip, norm = torch.stack([self.clip_on_device, self.norm_on_device]).tolist()
        return Combined(self.gradients, clip, norm, self.auxiliary)

    def of_domains(self) -> Gradients:
        """Return the gradient without the part of auxiliary losses, which hooks on layers do not see."""
        if self.auxiliary is None:
            return self.gradients
        clip = self.clip if self.clip_on_device is None else self.clip_on_device
        return [
            gradient if gradient is None or extra is None else gradient - clip * extra
            for gradient, extra in zip(self.gradients, self.auxiliary, strict=True)
        ]

    @property
    def clipped(self) -> bool:
        """Whether the gradient was shortened."""
        return self.clip < 1 and bool(self.norm)


def empty_trace(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros of a parameter's shape and layout, by default in float32 or better."""
    # A sum over many steps loses its small terms in half precision.
    dtype = dtype or torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def full_products(
    parameters: Parameters, vector: Gradients, traces: Sequence[Sequence[Tensor]], scale: Sequence[float]
) -> Vector:
    """Return ``sum_p scale_p <vector_p, z_jp>`` over all parameters p and processes, shape ``(m,)``."""
    # Each process has the trace of its local gradients, and all of this is linear in them.
    factors = np.multiply(scale, [distributed.replication_weight(p) for p in parameters.tensors])
    local = np.array([np.dot(local_products(vector, trace), factors) for trace in traces])
    return distributed.all_reduce_sum(local, parameters.device)


class Traces(ABC):
    """The traces of m domains.

    A round is ``reset``, then for each step ``begin_step``, ``add`` for every domain (or ``capture`` around a
    mixed batch), ``end_step``; then ``dot``. Steps in between that are not traced are passed to ``skip``.
    """

    supports_mixed_batches: bool = False
    """Whether the gradients of a mixed batch can be separated by domain."""
    clips_on_device: bool = False
    """Whether :meth:`end_step` takes :attr:`Combined.clip_on_device`."""
    supports_skipping: bool = False
    """Whether steps may be left out, with greater weight for those that are traced."""

    @abstractmethod
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Allocate memory, and check that these traces can follow the optimizer and the curvature."""

    @abstractmethod
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero.

        Args:
            validation: the validation gradient at the end of the previous round, where there was one.
        """

    @abstractmethod
    def begin_step(self, step: StepModel) -> None:
        """Decay the traces as the coming step does."""

    @abstractmethod
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """Add a domain's gradient.

        Args:
            gradients: its gradient at the parameters before the step.
            scale: its factor (share of the batch over inclusion probability).
        """

    def skip(self, step: StepModel, count: int) -> None:
        """Decay the traces as ``count`` steps do that were not traced, by the factors of the coming step.

        Only where :attr:`supports_skipping`, between steps.
        """

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Add the gradients of a mixed batch; its forward and backward pass run inside the context.

        Args:
            weights: the factors of the rows' losses by domain, positive, shape ``(m,)``.
        """
        raise ValueError(
            f"{self!r} cannot separate a mixed batch by domain: give one batch per domain (mixer.domain), or use "
            "Hypergradient(traces=ProjectedTraces())"
        )

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of all gradients in this step's mixed batches, a scalar; ``None`` if unknown."""
        return None

    def non_finite(self) -> list[int] | None:
        """Return the domains with a non-finite gradient in this step's mixed batches; ``None`` if unknown."""
        return None

    def end_step(self, combined: Combined) -> None:
        """Take the combined gradient; the optimizer has not stepped yet."""

    @property
    def can_drop_step(self) -> bool:
        """Whether nothing is left of a step that was begun and not ended, once ``begin_step`` is called again."""
        return True

    @abstractmethod
    def dot(self, vector: Gradients) -> Vector:
        """Return ``<vector, z_j>`` for every domain, shape ``(m,)``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the allocated memory."""

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Return the values and tensors that a run resumed in mid-round needs."""
        return {}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""


class TracesConfig(ConfigSection):
    """A kind of traces in the config of a run. Its keys, all with defaults, are keys of the section ``mixer``."""

    takes_mixed_batches: ClassVar[bool] = False
    """Whether a run gives them mixed batches, by hooks on the layers; otherwise one batch per domain."""
    with_sharded_parameters: ClassVar[Literal["sharded", "replicated", "unsupported"]] = "replicated"
    """How ranks hold them where ``fully_shard`` shards the parameters."""

    @abstractmethod
    def build(self) -> Traces:
        """Return new traces; a checkpoint is refused where their ``repr``, which shows the settings, differs."""

    def projected_size(self, parameters: Parameters) -> int:
        """Return the numbers per domain of projected traces, 0 for traces that are not projected."""
        return 0

    def least_bytes(self, parameters: int, domains: int) -> int:
        """Return the bytes of the traces of a model, or fewer where they depend on its layers.

        Args:
            parameters: the number of its parameters, in float32.
        """
        return 0

    def clipping_bytes(self, parameters: int, domains: int) -> int:
        """Return the bytes in addition where gradients are clipped."""
        return 0


TRACES = Registry[type[TracesConfig]]("kind of traces", package="mixwell.hypergradient.traces")
"""Kinds by name (``mixer.traces`` in the config of a run)."""
