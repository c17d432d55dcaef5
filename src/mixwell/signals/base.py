"""What every signal does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Json, Vector


class Signal(ABC):
    """Something measured per domain over a round, which says how the weights should move.

    The mixer calls, for each round, ``begin_round``; for each step ``begin_step``, ``fold`` once or more per
    domain (or ``capture`` around each mixed batch) and ``record_loss`` where losses are told, ``end_step``;
    and at the
    end ``scores``. A signal takes part in what it needs, and says before the run what that is.
    """

    @property
    def supports_mixed_batches(self) -> bool:
        """Whether a mixed batch can be told apart by domain."""
        return False

    @property
    def needs_graph(self) -> bool:
        """Whether domains' gradients must come with their graph (``backward(create_graph=True)``)."""
        return False

    @property
    def needs_validation(self) -> bool:
        """Whether a round ends with a validation gradient."""
        return True

    @property
    def needs_losses(self) -> bool:
        """Whether every domain's losses must be told (``scope.record_loss``; mixed batches have them)."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether with the losses those of a reference model must be told."""
        return False

    @property
    def objective(self) -> Literal["losses", "excess"]:
        """What a step makes less: the losses, or by how much they exceed those of the reference model."""
        return "losses"

    @property
    def parts(self) -> int:
        """In how many parts, at least, each domain's batch must be given, with their ``rows``."""
        return 1

    @property
    def linear(self) -> bool:
        """Whether the scores are linear in the validation gradient, so that parts of it tell their noise."""
        return False

    def validation_points(self, length: int) -> tuple[int, ...]:
        """The steps of a round after which a validation gradient is due.

        With several points the round's scores are the mean of the scores at each.

        Args:
            length: the number of steps in the round.

        Returns:
            Increasing, each in ``1..length``, the last one ``length``; empty where none is needed.
        """
        return (length,) if self.needs_validation else ()

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the run, and check that this signal fits it.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: what the signal may compute on its own, where the loop offers it.
        """

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """A round begins.

        Args:
            round_index: its number, from 0.
            weights: of the domains in it, shape ``(m,)``.
            validation: the validation gradient that ended the round before, ``None`` in the first.
        """

    def begin_step(self, *, remaining: int) -> None:
        """A step begins.

        Args:
            remaining: steps until the end of the round, this one included.
        """

    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """A domain's gradient is there.

        Args:
            domain: which.
            gradients: its gradient at the parameters before the step. They are the mixer's again afterwards.
            scale: its factor (share of the batch over inclusion probability).
            weight: the domain's weight.
            rows: that it is the mean over, where that was told.
        """

    def record_loss(
        self, domain: int, losses: Tensor, *, share: float, reference: Tensor | None = None
    ) -> None:
        """A domain's losses are there.

        Args:
            domain: which.
            losses: of its rows (or their tokens), or their mean; finite.
            share: the part of the domain's batch in this step that they are of.
            reference: the losses of the reference model on the same, of the same shape.
        """

    def domain_factor(self, domain: int) -> float:
        """By what a domain's gradient is multiplied in the training step, besides its weight.

        Args:
            domain: which.

        Returns:
            A number of at least 0.
        """
        return 1.0

    def row_factors(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor | None:
        """By what the losses of a mixed batch's rows are multiplied, besides the weights of their domains.

        Args:
            losses: of the rows, detached, shape ``(rows,)``.
            segments: which rows belong to which domain.
            data: the rows themselves, where the loop gave them to ``batch.weighted_loss``.

        Returns:
            Shape ``(rows,)``, or ``None`` for no factors.
        """
        return None

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """A mixed batch; its backward pass runs inside.

        Args:
            row_groups: which rows belong to which domain.
            weights: by which the losses of the rows are weighted, positive, shape ``(m,)``.

        Raises:
            ValueError: this signal needs one batch per domain.
        """
        raise ValueError(f"{self!r} needs one batch per domain (mixer.domain), not a mixed one")

    def non_finite(self) -> list[int] | None:
        """The domains whose gradients in the mixed batches of this step are not finite; ``None`` if not known."""
        return None

    def end_step(self, combined: Combined) -> None:
        """All domains are there; the optimizer steps next.

        Args:
            combined: what it is about to be given.
        """

    @abstractmethod
    def scores(self, validation: Gradients | None) -> Vector:
        """The score of every domain in the steps of the round so far; the weights move against it.

        It is called after the steps that :meth:`validation_points` names, or at the end of the round.

        Args:
            validation: the validation gradient at the current parameters; ``None`` where none is needed.

        Returns:
            Shape ``(m,)``.
        """

    @property
    def nbytes(self) -> int:
        """The memory that the signal holds."""
        return 0

    def summary(self) -> dict[str, float]:
        """Numbers of the last round for its record."""
        return {}

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What a run resumed in mid-round needs to know: plain values, and tensors."""
        return {}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
