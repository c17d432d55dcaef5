"""The interface of signals, with defaults so that a subclass states only what differs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.finite_draws import Reject, raise_error
from mixwell.signals.probes import Probes
from mixwell.simplex.rounds import ObservedSteps
from mixwell.simplex.weights import TINY
from mixwell.typing import Gradients, Json, Vector


@final
@dataclass(frozen=True)
class Requirements:
    """What a signal requires of the training loop.

    Args:
        domain_batches: one batch per domain (``mixer.domain``); a mixed batch is refused.
        mixed_batches: mixed batches (``mixer.batch``); a batch of one domain is refused.
        validation: a validation gradient at the end of every round.
        losses: every domain's losses (``scope.record_loss``; mixed batches pass them on).
        reference: with every loss that of a reference model.
        objective: what a training step minimizes: the losses, or their excess over the reference model's.
        graph: gradients with their graph (``backward(create_graph=True)``).
        parts: the least number of parts, with their ``rows``, in which every domain's batch is given.
    """

    domain_batches: bool = True
    mixed_batches: bool = False
    validation: bool = True
    losses: bool = False
    reference: bool = False
    objective: Literal["losses", "excess"] = "losses"
    graph: bool = False
    parts: int = 1


class Signal(ABC):
    """A measurement per domain over a round, which decides how the weights move.

    For each round the mixer calls ``begin_round``; for each observed step ``begin_step``, then ``fold`` once or
    more per domain (or ``capture`` around each mixed batch) and ``record_loss`` where losses are recorded, then
    ``end_step``; for the others ``skip_step``; and ``scores`` at the end of the round. What only some signals do
    is in :class:`RowFactors`, :class:`DomainFactors` and :class:`LinearSignal`.
    """

    requirements: Requirements = Requirements()
    """What the signal requires; set on the class, or in ``__init__`` where it depends on the settings."""
    constant: bool = False
    """Whether the weights never move, so that nothing is measured."""
    clips_on_device: bool = False
    """Whether the factor of clipping may be given as a tensor on an accelerator, which is not waited for."""
    uses_traces: bool = False
    """Whether the signal keeps traces; their kind decides which batches suit them best."""
    _saved: ClassVar[tuple[str, ...]] = ()
    """The attributes from which a run resumes in mid-round: plain values; arrays and tensors of a fixed shape; and
    lists of tensors, by parameter or by domain and parameter."""
    _attached = False
    _parameters: Parameters
    _domains: tuple[str, ...]
    _reject: Reject

    @property
    def uses_hessian_products(self) -> bool:
        """Whether an observed step takes products with the Hessian, one with every trace."""
        return False

    @final
    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
        reject: Reject = raise_error,
    ) -> None:
        """Prepare for a run.

        Args:
            probes: for signals that compute outside of the training step.
            reject: is called for what a signal leaves out because it is not finite.

        Raises:
            ValueError: the signal is in use by another mixer, or does not fit this run.
        """
        if self._attached:
            raise ValueError(
                f"this {type(self).__name__} is in use by another mixer; make a new one for each"
            )
        self._parameters, self._domains, self._reject = parameters, tuple(domains), reject
        self._attach(optimizer, probes)
        self._attached = True

    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        """Allocate memory; ``_parameters`` and ``_domains`` are set already."""

    def validation_points(self, length: int) -> tuple[int, ...]:
        """Return the steps of a round of this length after which a validation gradient is due.

        With several points the round's scores are the mean of the scores at each.

        Returns:
            Increasing, each in ``1..length``, the last one ``length``; empty where none is required.
        """
        return (length,) if self.requirements.validation else ()

    def observed_steps(self, round_index: int, length: int) -> ObservedSteps:
        """Return the steps of a round that the signal observes; by default all.

        All others are plain training, in which the signal is given nothing but :meth:`skip_step`.

        Args:
            length: the number of steps of the round.
        """
        return ObservedSteps(range(length))

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Begin a round.

        Args:
            round_index: counts from 0.
            weights: the weights during the round, shape ``(m,)``.
            validation: the validation gradient that ended the previous round, ``None`` in the first.
        """

    def begin_step(self, *, remaining: int, interval: int) -> None:
        """Begin a step that is observed; a step that was begun before and not ended is dropped.

        Args:
            remaining: steps until the end of the round, including this one.
            interval: the number of steps that this one stands for, the ``interval`` of :meth:`observed_steps`.
        """

    def skip_step(self) -> None:
        """Take note of a step of the round that is not observed."""

    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Take a domain's gradient at the parameters before the step.

        Args:
            gradients: valid during the call only.
            scale: the gradient's factor (fraction of the batch over inclusion probability).
            rows: the number of rows that the gradient is the mean over, where known.

        Raises:
            ValueError: the signal refuses it; nothing was changed.
        """
        if self.requirements.mixed_batches:
            raise ValueError(
                f"{self!r} weights every row, so it requires mixed batches: mixer.batch, not mixer.domain"
            )

    def record_loss(
        self, domain: int, losses: Tensor, *, fraction: float, reference: Tensor | None = None
    ) -> None:
        """Take a domain's losses.

        Args:
            losses: of its rows (or their tokens), or their mean; finite.
            fraction: the fraction of the domain's batch in this step that they belong to.
            reference: the losses of the reference model, of the same shape.
        """

    def capture(self, groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Return a context for the backward pass of a mixed batch; by default it captures nothing.

        Args:
            groups: which rows belong to which domain.
            weights: the factors of the losses by domain, positive, shape ``(m,)``.

        Raises:
            ValueError: the signal requires one batch per domain.
        """
        if self.requirements.domain_batches:
            raise ValueError(f"{self!r} needs one batch per domain (mixer.domain), not a mixed one")
        return nullcontext(CaptureContext())

    @property
    def can_drop_step(self) -> bool:
        """Whether :meth:`begin_step` can drop the step that was begun, so that nothing of it is left."""
        return True

    def end_step(self, combined: Combined) -> None:
        """End a step; all gradients are folded and the optimizer steps next with ``combined``."""

    @abstractmethod
    def scores(self, validation: Gradients | None) -> Vector | None:
        """Return the score of every domain over the round so far; the weights move against it.

        Called after the steps that :meth:`validation_points` names, or at the end of the round.

        Args:
            validation: the validation gradient at the current parameters; ``None`` where none is required.

        Returns:
            Shape ``(m,)``; ``None`` where nothing finite was measured, which was rejected already.
        """

    @property
    def nbytes(self) -> int:
        """The memory that the signal holds."""
        return 0

    def summary(self) -> dict[str, float]:
        """Return numbers of the last round for its record."""
        return {}

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Return plain values and tensors from which a run resumes in mid-round, by default ``_saved``."""
        values: Json = {}
        tensors: dict[str, Tensor] = {}
        for attribute in self._saved:
            name, value = attribute.removeprefix("_"), getattr(self, attribute)
            found = _tensors_of(name, value)
            tensors |= found
            if not found:
                values[name] = value
        return values, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
        plain, own = Signal.state(self)
        for name in plain:
            setattr(self, f"_{name}", values[name])
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class RowFactors(ABC):
    """A signal that multiplies the losses of single rows (row weighting methods)."""

    @abstractmethod
    def row_factors(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor | None:
        """Return factors of the rows' losses in a mixed batch, applied in addition to the domains' weights.

        Args:
            losses: detached, shape ``(rows,)``.
            groups: which rows belong to which domain.
            data: the rows, where the loop passes them to ``batch.weighted_loss``.

        Returns:
            Shape ``(rows,)``, or ``None`` for no factors.
        """


class DomainFactors(ABC):
    """A signal that multiplies domains' gradients in the training step (balanced PiKE)."""

    @abstractmethod
    def domain_factor(self, domain: int) -> float:
        """Return the factor, at least 0, applied in addition to the domain's weight."""


class LinearSignal(Signal):
    """A signal with scores that are linear in the validation gradient, so that parts of it show their noise."""

    def gradient_sum(self) -> Tensor | None:
        """Return the sum of all gradients captured in this step, a scalar on their device; ``None`` if unknown."""
        return None

    def non_finite(self) -> list[int] | None:
        """Return the domains with captured gradients that are not finite in this step; ``None`` if unknown."""
        return None


@final
class ConstantWeights(Signal):
    """Measures nothing and costs nothing, for training with fixed weights: all scores are zero."""

    constant = True
    requirements = Requirements(domain_batches=False, validation=False)

    def __repr__(self) -> str:
        return "ConstantWeights()"

    @override
    def observed_steps(self, round_index: int, length: int) -> ObservedSteps:
        return ObservedSteps(())

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        return np.zeros(len(self._domains))


def scores_of_weights(weights: Vector) -> Vector:
    """Return the scores ``-log w`` with which :class:`mixwell.SoftmaxWeights` sets the weights w."""
    return -np.log(np.maximum(weights, TINY))


def _tensors_of(name: str, value: object) -> dict[str, Tensor]:
    """Return the tensors of an attribute, which share the memory of arrays; a plain value has none."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, np.ndarray):
        return {name: torch.from_numpy(value)}
    found: dict[str, Tensor] = {}
    for index, one in enumerate(cast("list[object]", value) if isinstance(value, list) else ()):
        found |= _tensors_of(f"{name}.{index}", one)
    return found
