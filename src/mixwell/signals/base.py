"""What every signal does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor
from torch.optim import Optimizer

from mixwell.parameters import Gradients, Parameters
from mixwell.segments import Segments
from mixwell.traces.base import Combined, Json
from mixwell.watching import RowWatch
from mixwell.weights import Vector


class Signal(ABC):
    """Something measured per domain over a round, which says how the weights should move.

    The mixer calls, for each round, ``begin_round``; for each step ``begin_step``, ``fold`` once or more per
    domain (or ``rows`` around each mixed batch), ``end_step``; and at the end ``scores``.
    """

    @property
    def takes_rows(self) -> bool:
        """Whether a mixed batch can be told apart by domain."""
        return False

    @property
    def needs_graph(self) -> bool:
        """Whether domains' gradients must come with their graph (``backward(create_graph=True)``)."""
        return False

    @abstractmethod
    def attach(self, optimizer: Optimizer, parameters: Parameters, domains: Sequence[str]) -> None:
        """Learn of the run, and check that this signal fits it.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
        """

    @abstractmethod
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """A round begins.

        Args:
            round_index: its number, from 0.
            weights: of the domains in it, shape ``(m,)``.
            validation: the validation gradient that ended the round before, ``None`` in the first.
        """

    @abstractmethod
    def begin_step(self, *, remaining: int) -> None:
        """A step begins.

        Args:
            remaining: steps until the end of the round, this one included.
        """

    @abstractmethod
    def fold(self, domain: int, gradients: Gradients, *, scale: float, weight: float) -> None:
        """A domain's gradient is there.

        Args:
            domain: which.
            gradients: its gradient at the parameters before the step. They are the mixer's again afterwards.
            scale: its factor (share of the batch over inclusion probability).
            weight: the domain's weight.
        """

    def rows(self, segments: Segments, weights: Vector) -> AbstractContextManager[RowWatch]:
        """A mixed batch; its backward pass runs inside.

        Args:
            segments: which rows belong to which domain.
            weights: by which the losses of the rows are weighted, positive, shape ``(m,)``.

        Raises:
            ValueError: this signal needs one batch per domain.
        """
        raise ValueError(f"{self!r} needs one batch per domain (mixer.domain), not a mixed one")

    def non_finite(self) -> list[int] | None:
        """The domains whose gradients in the mixed batches of this step are not finite; ``None`` if not known."""
        return None

    @abstractmethod
    def end_step(self, combined: Combined) -> None:
        """All domains are there; the optimiser steps next.

        Args:
            combined: what it is about to be given.
        """

    @abstractmethod
    def scores(self, validation: Gradients) -> Vector:
        """The score of every domain in the round that ends; the weights move against it.

        Args:
            validation: the validation gradient at the current parameters.

        Returns:
            Shape ``(m,)``.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that the signal holds."""

    def summary(self) -> dict[str, float]:
        """Numbers of the last round for its record."""
        return {}

    @abstractmethod
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a run resumed in mid-round needs to know: plain values, and tensors."""

    @abstractmethod
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
