"""The properties of a mixer: its weights and constraints, where its run is, and what is due next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mixwell.mixer.records import RoundRecord
from mixwell.mixer.round import RoundAccumulator
from mixwell.mixer.step import StepAccumulator
from mixwell.signals import Signal
from mixwell.simplex import rounds as round_lengths
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.weights import Weights


class MixerProperties:
    """The base of :class:`mixwell.Mixer`, which has the verbs."""

    signal: Signal
    rounds: list[RoundRecord]
    _round: RoundAccumulator
    _step: StepAccumulator

    @property
    def weights(self) -> Weights:
        """The weights: the last ones, their average and their history."""
        return self._round.weights

    @weights.setter
    def weights(self, given: Weights | Mapping[str, float] | Sequence[float]) -> None:
        """Set the weights from the next step on, or the nearest ones that the constraints allow.

        Between steps. A round that has begun ends without an update, since a round has one mixture. With several
        ranks all must set the same.
        """
        self._step.expect_between_steps("mixer.weights = ...", forget_step=False)
        if given is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError("mixer.weights must be set to numbers by domain, got None")
        self._round.set_weights(given.last if isinstance(given, Weights) else given)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints of the weights."""
        return self._round.updater.constraints

    @constraints.setter
    def constraints(self, given: Sequence[Constraint]) -> None:
        """Set the constraints from the next update on.

        They replace all earlier ones; to add one, give ``[*mixer.constraints, Floor(0.02)]``. A state is loaded
        into a mixer that was made with the constraints of the time when it was saved.
        """
        self._round.updater.set_constraints(self.weights.names, given, steps_done=self.steps_done)

    @property
    def horizon(self) -> int:
        """The number T of training steps in a round."""
        return self._round.clock.horizon

    @property
    def budget(self) -> int | None:
        """The number N of training steps, where it is known."""
        return self._round.clock.budget

    @property
    def steps_done(self) -> int:
        """The number of training steps so far."""
        return self._round.clock.steps_done

    @property
    def validation_due(self) -> bool:
        """Whether a validation gradient is due before the next step (``with mixer.validation():``).

        That is so several times in the later part of a round and at its end, when the weights are updated with it;
        never where the signal needs none.
        """
        return self._round.validation_due

    @property
    def trace_due(self) -> bool:
        """Whether the next step leaves a trace; where not, it is plain training.

        In a long round only one of every s steps does (``Hypergradient(trace_every=...)``). In the others a mixed
        batch will do, also for signals that require one batch per domain, and the model may be a compiled one.
        """
        return self._round.trace_due

    def validation_rows(self, batch_rows: int) -> int:
        """Return the number of rows of a validation batch with which those of a round take 5% of its traced steps.

        Those are the steps that are traced by default, so that is 5% of training in rounds of up to 95 steps, and
        1% in those of 300. In a round of fewer than twenty steps they are one training batch in all. A batch has
        at least one.

        Args:
            batch_rows: the rows of a training step, all domains together.
        """
        points = len(self.signal.validation_points(self.horizon))
        return round_lengths.validation_rows(batch_rows, steps=self.horizon, points=points)

    @property
    def round_ended(self) -> RoundRecord | None:
        """The record of the round that ended with the last step and its validation, ``None`` where none did."""
        last = self.rounds[-1] if self.rounds else None
        return last if last is not None and last.first_step + last.steps == self.steps_done else None

    @property
    def round_left(self) -> int:
        """The number of steps until the weights may change, so that batches may be drawn ahead."""
        return self._round.clock.remaining

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest weight that the constraints allow each domain, as of the last update."""
        return self._round.updater.limits(self.weights.names)

    @property
    def requires_equal_forward_passes(self) -> bool:
        """Whether all ranks must run the model equally often, since each has parts of it (``fully_shard``)."""
        return self._round.parameters.sharded

    @property
    def nbytes(self) -> int:
        """The memory in bytes that mixing holds in addition to plain training: traces and weighted sum."""
        return self.signal.nbytes + self._step.sum.nbytes

    @property
    def skipped(self) -> dict[str, int]:
        """The number of non-finite contributions that were skipped so far, by domain, where there were any."""
        return dict(self._round.nonfinite.total)
