"""One round after the other: losses, validation gradients, the scores at each, and new weights at the end."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from mixwell import distributed
from mixwell.distributed.consistency import check_weights_in_sync
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.batch import DomainBatch
from mixwell.mixer.gradient_collector import GradientCollector
from mixwell.mixer.gradient_sum import WeightedSum
from mixwell.mixer.nonfinite import NonFiniteGuard
from mixwell.mixer.readings import Readings
from mixwell.mixer.records import AUXILIARY, SCORES, RoundRecord
from mixwell.mixer.row_counts import RowCounts
from mixwell.mixer.scopes import DomainScope
from mixwell.mixer.scores import LossMeans, RoundScores
from mixwell.mixer.step_progress import StepProgress
from mixwell.signals import Signal
from mixwell.signals.base import LinearSignal
from mixwell.signals.finite_draws import VALIDATION
from mixwell.simplex.rounds import ObservedSteps, RoundClock
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.simplex.weights import Weights
from mixwell.typing import Gradients

# Sources of non-finite values that all ranks find at once, so that each of them counts it.
COMMON = ("batch", "combined gradient", AUXILIARY, SCORES, VALIDATION)


@final
class RoundAccumulator:
    """Accumulates a round, updates the weights at its end, and begins the next."""

    def __init__(
        self,
        weights: Weights,
        clock: RoundClock,
        updater: WeightUpdater,
        parameters: Parameters,
        signal: Signal,
        nonfinite: NonFiniteGuard,
    ) -> None:
        self.weights, self.clock, self.updater = weights, clock, updater
        self.parameters, self.signal, self.nonfinite = parameters, signal, nonfinite
        self.averaged = distributed.is_ddp(parameters.model)
        """Whether gradients of domains and of validation are averaged over ranks when they are complete."""
        self.records: list[RoundRecord] = []
        self.row_counts = RowCounts(weights.names)
        self.readings = Readings(parameters.device, at_once=nonfinite.policy == "skip")
        """What the model's device has computed and the host has not read."""
        self.begun = False
        """Whether ``signal.begin_round`` was called for this round."""
        self._begun_at = 0  # the steps of the round before that call
        self.interrupted = False
        """Whether an error has left something half changed, so that only loading a state helps."""
        self._clear()

    def _clear(self) -> None:
        self.losses, self.scores = LossMeans(), RoundScores()
        self._points_lost = 0
        self.nonfinite.in_round = {}
        self.row_counts.clear()
        self.drop_point()

    # ------------------------------------------------------------------------------------------- steps

    def begin_step(self) -> bool:
        """Return whether the next step belongs to a round, which has begun then."""
        if self.clock.in_round and not self.begun:
            self._begin(None)
        return self.clock.in_round

    @property
    def observed_steps(self) -> ObservedSteps:
        """The steps of the round that the signal observes."""
        return self.signal.observed_steps(self.clock.round_index, self.clock.round_length)

    @property
    def trace_due(self) -> bool:
        """Whether the signal observes the next step."""
        return self.clock.in_round and self.clock.steps_in_round in self.observed_steps

    def end_step(self) -> None:
        """Count a step. Where the signal needs no validation gradient, the last one ends the round."""
        self.row_counts.end_step()
        self.clock.tick()
        if self.clock.round_done:
            self.readings.read()
        if self.clock.round_done and not self._due_points:
            with self.parameters.full_precision(), self.indivisible():
                self._add_scores(None)
                self._end(None)

    def set_weights(self, given: Mapping[str, float] | Sequence[float]) -> None:
        """Set the weights from the next step on, or the nearest ones that the constraints allow.

        A round has one mixture, which its traces and the average of the weights are of. So the steps of this one
        end it without an update.
        """
        self.readings.read()
        weights, steps = self.weights, self.clock.steps_in_round
        self.updater.at_step(self.clock.steps_done)
        log, before = self.updater.nearest_weights(weights.names, given).log, weights.last
        if not steps:
            weights.replace(log)
        else:
            weights.advance(log, steps=steps)
            self._sync()
            self.records.append(self._record(before, steps=steps))
            self._clear()
            self.clock.next_round()
        self.begun = False

    def restart(self) -> None:
        """Let the signal begin the round again with the next step, as if it had none before.

        A step that is skipped may be in sums (dense traces, those of TiKMiX), from which it cannot be subtracted.
        What the round has scored stays.
        """
        self.begun = False

    @contextmanager
    def indivisible(self, *, unless: tuple[type[Exception], ...] = ()) -> Generator[None]:
        """Refuse every later call if the block raises, because half of what it changes would stay.

        Args:
            unless: exceptions that are raised before anything is changed.
        """
        try:
            yield
        except unless:
            raise
        except BaseException:
            self.interrupted = True
            raise

    def expect_intact(self) -> None:
        """Raise a RuntimeError if an error has left something half changed."""
        if self.interrupted:
            raise RuntimeError(
                f"step {self.clock.steps_done} was interrupted by an error, and what it had begun cannot be "
                "undone (gradients were added to the traces, or earlier batches of the step are lost): load a "
                "state from before it (mixer.load_state_dict, mixer.load), or make a new "
                "Mixer(weights=mixer.weights.last). A step can be tried again with batches of a MixtureLoader "
                "and Hypergradient(traces=ProjectedTraces())"
            )

    # ------------------------------------------------------------------------------------------- validation

    @property
    def _due_points(self) -> tuple[int, ...]:
        return self.signal.validation_points(self.clock.round_length)

    @property
    def validation_due(self) -> bool:
        """Whether a validation gradient is due before the next step."""
        done, due = len(self.scores.points) + self._points_lost, self._due_points
        return done < len(due) and self.clock.steps_in_round == due[done]

    @property
    def validating(self) -> bool:
        """Whether a part of a validation gradient was given."""
        return bool(self._given)

    def expect_no_validation_due(self) -> None:
        """Raise a RuntimeError if a validation gradient is due."""
        if self.validation_due:
            fraction = self._given.fraction(VALIDATION)
            so_far = f" (fractions that sum to {fraction:g} of 1 were given)" if fraction else ""
            raise RuntimeError(
                f"a validation gradient is due after step {self.clock.steps_done}{so_far}: compute it in `with "
                "mixer.validation():` where mixer.validation_due is true, before more training"
            )

    def _expect_validation_due(self) -> None:
        if not self.signal.requirements.validation:
            raise RuntimeError(
                f"{self.signal!r} needs no validation gradient; call mixer.validation() only where "
                "mixer.validation_due is true"
            )
        if not self.validation_due:
            raise RuntimeError(
                f"no validation gradient is due ({self.clock!r}); call mixer.validation() only where "
                "mixer.validation_due is true after mixer.step()"
            )

    @contextmanager
    def validation(self, part: DomainBatch, collector: GradientCollector) -> Generator[DomainScope]:
        """Add a part of a validation gradient; the last one of the last point ends the round.

        Yields:
            The scope that records the loss.
        """
        self.expect_intact()
        self._expect_validation_due()
        self.readings.read()
        self._given.expect_domain(part, self.clock.steps_done)
        with self.parameters.buffers_kept(), collector.collect(part, self.clock.steps_done) as scope:
            yield scope
        with self.parameters.full_precision():
            accepted = self.nonfinite.accept_scope(scope, self.clock.steps_done, self.parameters)
            try:
                self._add_validation(scope, accepted=accepted)
                self._given.add_domain(part)
                if not self._given.complete(VALIDATION):
                    return
                validation = self._end_point()
            except BaseException:
                self.drop_point()  # with all its parts
                raise
            self.drop_point()
            if self.clock.round_done:
                with self.indivisible():
                    self._end(validation)

    def _add_validation(self, scope: DomainScope, *, accepted: bool) -> None:
        if not accepted:
            self._lost = True
            return
        part = scope.batch
        # The score of a part needs its gradient over all ranks, which exists of the whole only.
        if (
            part.fraction < 1
            and len(self._due_points) == 1
            and isinstance(self.signal, LinearSignal)
            and distributed.is_single_process()
            and (scores := self.signal.scores(scope.gradients)) is not None
        ):
            self.scores.add_part(part.fraction, scores)
        self._validation = self._validation or self._new_sum()
        self._validation.take(scope.gradients, part.fraction)
        scope.gradients = []
        self._losses.append((scope.loss, part.fraction * part.rank_scale))

    def _end_point(self) -> Gradients | None:
        """Score a complete validation gradient and return it; ``None`` if a part had to be skipped."""
        if not distributed.is_single_process():
            if self.nonfinite.policy == "skip":
                self._lost = distributed.any_rank(self._lost, self.parameters.device)
            if self.averaged and not self._lost:
                self._validation = self._validation or self._new_sum()
                self._validation.all_reduce()
        validation = None if self._lost or self._validation is None else self._validation.gradients
        if validation is None or not self._add_scores(validation):
            self._points_lost += 1
        for loss, fraction in self._losses:
            self.losses.add(VALIDATION, loss, fraction)
        return validation

    def drop_point(self) -> None:
        """Forget the parts of a validation gradient."""
        self._validation: WeightedSum | None = None
        self._given, self._lost = StepProgress((VALIDATION,)), False
        self._losses: list[tuple[Any, float]] = []
        if not self.scores.points:
            self.scores.parts = []

    def _new_sum(self) -> WeightedSum:
        return WeightedSum(self.parameters, lazy=True, averaged=self.averaged)

    def _add_scores(self, validation: Gradients | None) -> bool:
        """Add the signal's scores; return whether they are finite and there was a step to score."""
        if not self.begun:
            return False
        scores = self.signal.scores(validation)
        if scores is None:
            return False
        wrong = [n for n, s in zip(self.weights.names, scores, strict=True) if not np.isfinite(s)]
        if wrong:
            self.nonfinite.reject(
                SCORES,
                f"the score of {', '.join(wrong)} overflowed in round {self.clock.round_index}",
                "Lower the learning rate, shorten the horizon, or raise the curvature",
            )
            return False
        self.scores.add(self.clock.steps_in_round - self._begun_at, scores)
        return True

    # ------------------------------------------------------------------------------------------- beginning and end

    def _begin(self, validation: Gradients | None) -> None:
        self.signal.begin_round(self.clock.round_index, self.weights.values, validation)
        self.begun, self._begun_at = True, self.clock.steps_in_round

    def _end(self, validation: Gradients | None) -> None:
        self.row_counts.check(self.weights.values)
        self.records.append(self._update_weights())
        self._clear()
        self.clock.next_round()
        self.begun = False
        if not self.clock.finished:
            self._begin(validation)

    def _update_weights(self) -> RoundRecord:
        weights, clock, points = self.weights, self.clock, self.scores
        before, scores, noise = weights.last, points.mean(), points.standard_errors()
        # The noise estimated from the parts of one batch is for the record only: the number of parts in which a
        # batch is computed must not change the weights.
        known = noise if len(points.points) > 1 else None
        step_size = self.updater.apply(weights, scores, clock, noise=known)
        self._sync()
        return self._record(
            before,
            steps=clock.round_length,
            step_size=step_size,
            scores={} if scores is None else dict(zip(weights.names, scores.tolist(), strict=True)),
            noise={} if noise is None else dict(zip(weights.names, noise.tolist(), strict=True)),
            points=len(points.points),
            measured={**self.signal.summary(), **self.updater.update.summary()},
        )

    def _record(
        self,
        before: dict[str, float],
        *,
        steps: int,
        step_size: float = 0.0,
        scores: dict[str, float] | None = None,
        points: int = 0,
        **found: Any,
    ) -> RoundRecord:
        return RoundRecord(
            index=self.clock.round_index,
            first_step=self.clock.round_start,
            steps=steps,
            weights=before,
            scores=scores or {},
            step_size=step_size,
            new_weights=self.weights.last,
            losses=self.losses.means(),
            skipped=dict(self.nonfinite.in_round),
            points=points,
            **found,
        )

    def _sync(self) -> None:
        """Check that all ranks have the same weights, and merge their losses and skipped contributions."""
        if distributed.is_single_process():
            return
        names = self.weights.names
        recorded, counted = [*names, VALIDATION], [*names, *COMMON]
        sums = [self.losses.sums.get(name, (0.0, 0.0)) for name in recorded]
        skipped = [float(self.nonfinite.in_round.get(name, 0)) for name in counted]
        own = np.concatenate([self.weights.values, np.ravel(sums), skipped])
        found = distributed.all_gather_array(own, self.parameters.device)
        weights, sums, skipped = np.split(found, np.cumsum([len(names), 2 * len(recorded)]), axis=1)
        check_weights_in_sync(weights, names, round_index=self.clock.round_index)
        totals = sums.sum(axis=0).reshape(-1, 2).tolist()
        self.losses.sums = {
            name: (total, count) for name, (total, count) in zip(recorded, totals, strict=True) if count
        }
        for name, column in zip(counted, skipped.T, strict=True):
            # Ranks of a sharded model skip the same contributions.
            everywhere = int(column.max() if self.parameters.sharded or name in COMMON else column.sum())
            before = self.nonfinite.total.get(name, 0) - self.nonfinite.in_round.get(name, 0)
            if everywhere:
                self.nonfinite.in_round[name] = everywhere
                self.nonfinite.total[name] = before + everywhere

    # ------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Return what a run resumed in mid-round needs, as plain values."""
        self.readings.read()
        return {
            "rounds": [record.to_json() for record in self.records],
            "skipped": dict(self.nonfinite.total),
            "skipped_in_round": dict(self.nonfinite.in_round),
            "round_begun": self.begun,
            "round_begun_at": self._begun_at,
            "losses": {name: list(sums) for name, sums in self.losses.sums.items()},
            "points": self.scores.state(),
            "points_lost": self._points_lost,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        self._clear()
        self.readings.forget()
        self.interrupted = False
        self.records[:] = [RoundRecord(**record) for record in values["rounds"]]
        self.nonfinite.total = dict(values["skipped"])
        self.nonfinite.in_round = dict(values["skipped_in_round"])
        self.begun, self._begun_at = bool(values["round_begun"]), int(values["round_begun_at"])
        self.losses.sums = {name: (total, count) for name, (total, count) in values["losses"].items()}
        self.scores.load_state(values["points"])
        self._points_lost = int(values["points_lost"])
