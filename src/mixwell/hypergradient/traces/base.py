"""What every kind of trace does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import OptimizerModel, StepResponse
from mixwell.typing import Gradients, Json, Vector


@final
@dataclass(frozen=True)
class StepModel:
    """What a training step does to a trace, as far as it is known before the step.

    Args:
        optimizer: the optimizer.
        responses: how each parameter answers a gradient.
        curvature: the coefficient of each parameter.
        clip: the factor by which clipping shortened the last combined gradient.
        remaining: steps until the end of the round, this one included.
        indices: which of the optimizer's parameters these are; ``None`` for all.
    """

    optimizer: OptimizerModel
    responses: Sequence[StepResponse]
    curvature: Sequence[float | Tensor]
    clip: float = 1.0
    remaining: int = 1
    indices: Sequence[int] | None = None

    def shrink(self, index: int) -> float | Tensor:
        """The factor of the old trace of a parameter.

        Args:
            index: which parameter.

        Returns:
            ``1 - eta lambda - eta P H``.
        """
        return self.responses[index].shrink(self.curvature[index], clip=self.clip)

    def rate(self, index: int) -> float:
        """The factor of a new gradient of a parameter, before the preconditioner.

        Args:
            index: which parameter.

        Returns:
            eta, with clipping.
        """
        return self.responses[index].rate * self.clip

    def preconditioner(self, index: int) -> Tensor | None:
        """The diagonal of P of a parameter as it is now: the optimizer may have stepped or been loaded since.

        Args:
            index: which parameter.

        Returns:
            ``None`` for the identity.
        """
        place = index if self.indices is None else self.indices[index]
        compute = self.optimizer.response(place, remaining=1).preconditioner
        return None if compute is None else compute()

    def subset(self, indices: Sequence[int]) -> StepModel:
        """The same for some of the parameters.

        Args:
            indices: which.

        Returns:
            A step model of those.
        """
        return replace(
            self,
            responses=[self.responses[i] for i in indices],
            curvature=[self.curvature[i] for i in indices],
            indices=[i if self.indices is None else self.indices[i] for i in indices],
        )


@final
@dataclass(frozen=True)
class Combined:
    """The combined gradient that the optimizer is about to be given.

    Args:
        gradients: after clipping.
        clip: the factor of clipping, 1 where nothing was clipped.
        norm: the norm before clipping, where it was measured.
    """

    gradients: Gradients
    clip: float = 1.0
    norm: float | None = None


def empty_trace(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape and layout, in float32 or better.

    Args:
        parameter: any.

    Returns:
        A new tensor.
    """
    kind = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=kind, requires_grad=False)


class Traces(ABC):
    """The traces of m domains.

    A round is ``reset``, then for each step ``begin_step``, ``add`` for every domain (or ``rows`` around a mixed
    batch), ``end_step``; then ``dot``.
    """

    supports_mixed_batches: bool = False
    """Whether a mixed batch can be told apart by domain."""

    @abstractmethod
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Take the memory, and check that these traces can follow the optimizer and the curvature.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does as things are now.
        """

    @abstractmethod
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero.

        Args:
            round_index: the number of the round that begins.
            validation: the validation gradient that ended the round before, where there was one.
        """

    @abstractmethod
    def begin_step(self, step: StepModel) -> None:
        """Fade the traces as the coming step does.

        Args:
            step: what the step does.
        """

    @abstractmethod
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """Fold a domain's gradient in.

        Args:
            domain: which.
            gradients: its gradient at the parameters before the step.
            scale: its factor (share of the batch over inclusion probability).
        """

    def rows(self, segments: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Fold the gradients of a mixed batch in, whose backward pass runs inside.

        Args:
            segments: which rows belong to which domain.
            weights: by which the losses of the rows are weighted, positive, shape ``(m,)``.

        Raises:
            ValueError: these traces cannot.
        """
        raise ValueError(
            f"{self!r} cannot tell a mixed batch apart: give one batch per domain (mixer.domain), or use "
            "Hypergradient(traces=ProjectedTraces())"
        )

    def non_finite(self) -> list[int] | None:
        """The domains whose gradients in the mixed batches of this step are not finite; ``None`` if not known."""
        return None

    def end_step(self, combined: Combined) -> None:
        """The combined gradient is known; the optimizer has not stepped yet.

        Args:
            combined: what the optimizer is about to be given.
        """

    @abstractmethod
    def dot(self, vector: Gradients) -> Vector:
        """``<vector, z_j>`` for every domain.

        Args:
            vector: one tensor per parameter, ``None`` for zero.

        Returns:
            Shape ``(m,)``.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that is held."""

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a run resumed in mid-round needs to know: plain values, and tensors."""
        return {}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
