"""One training step: which parts of the domains' batches were computed, and the gradient they add up to."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.hypergradient.traces.base import Combined
from mixwell.mixer.auxiliary import AuxiliaryGradients
from mixwell.mixer.batch import DomainBatch, MixtureBatch
from mixwell.mixer.block_results import BlockResults, Losses
from mixwell.mixer.gradient_collector import GradientCollector
from mixwell.mixer.gradient_sum import WeightedSum
from mixwell.mixer.loss_records import expect_recorded, record_rows
from mixwell.mixer.round import RoundAccumulator
from mixwell.mixer.row_labels import RowLabels, domain_numbers, resolve_expected
from mixwell.mixer.scopes import BatchScope, DomainScope
from mixwell.mixer.step_progress import StepProgress
from mixwell.signals.base import DomainFactors
from mixwell.typing import Gradients

# Losses of rows are weighted by no less, so that a domain's gradient can be recovered from the weighted one.
_LEAST_WEIGHT = 1e-20


@final
class StepAccumulator:
    """Accumulates a training step, from domains one at a time or from mixed batches.

    Args:
        round_accumulator: the round that the step belongs to, with the weights and the signal.
        collector: opens the blocks in which gradients are computed.
        clip_norm: clip the norm of the combined gradient to this.
    """

    def __init__(
        self,
        round_accumulator: RoundAccumulator,
        collector: GradientCollector,
        optimizer: Optimizer,
        clip_norm: float | None,
    ) -> None:
        self._round, self._collector = round_accumulator, collector
        if clip_norm is not None and not (np.isfinite(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}")
        self._optimizer, self.clip_norm = optimizer, None if clip_norm is None else float(clip_norm)
        self._names = round_accumulator.weights.names
        self._parameters, self._signal = round_accumulator.parameters, round_accumulator.signal
        self._nonfinite, self._averaged = round_accumulator.nonfinite, round_accumulator.averaged
        lazy = not self._signal.requirements.domain_batches
        self.sum = WeightedSum(self._parameters, lazy=lazy, averaged=self._averaged)
        self._results = BlockResults(round_accumulator)
        self._auxiliary = AuxiliaryGradients(self._parameters, collector, self._nonfinite, self.sum)
        self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._given = StepProgress(self._names)
        self.sum.clear()
        self._collector.forget_gradients()
        self._losses: Losses = []
        self._skipped: tuple[dict[str, int], dict[str, int]] | None = None  # counts before the step
        self._lost = False  # whether the gradient of a mixed batch is not finite
        self._traced = False  # whether signal.begin_step was called
        self._folded = False  # whether signal.end_step was called
        self._prepared = False  # whether the gradients are combined, and the optimizer steps next

    def expect_between_steps(self, call: str, *, forget_step: bool) -> None:
        """Raise a RuntimeError if a state would be that of the middle of a step.

        Args:
            forget_step: whether a step that was begun may be left out, where nothing of it is in the traces.
        """
        self._collector.expect_closed(call)
        self._round.expect_intact()
        if not (self._given or self._round.validating):
            return
        if not forget_step:
            raise RuntimeError(
                f"{call} is possible between steps, not in the middle of one; do it after mixer.step() or after "
                "the block of mixer.validation()"
            )
        if not self._can_drop:
            raise RuntimeError(
                f"in the middle of a step {self._signal!r} contains a part of it, which a state cannot forget; "
                "take it after mixer.step(), or use Hypergradient(traces=ProjectedTraces())"
            )

    @property
    def _can_drop(self) -> bool:
        """Whether nothing of the step is left once another is begun in its place."""
        return not self._traced or (self._signal.can_drop_step and not self._folded)

    def abandon(self) -> None:
        """Forget the step after an error, or refuse every later call where something of it would be left.

        That the gradients of earlier mixed batches go with it is seen when the step ends, from the fractions that
        are missing then; with labels and expected counts nobody would see it.
        """
        if self._given.any_number_of_batches or not self._can_drop:
            self._round.interrupted = True
        if self._skipped is not None:
            self._nonfinite.total, self._nonfinite.in_round = self._skipped
        self._round.row_counts.drop_step()
        self._parameters.clear_gradients()
        self.clear()

    def _keep_skipped(self) -> None:
        if self._skipped is None:
            self._skipped = dict(self._nonfinite.total), dict(self._nonfinite.in_round)

    def _begin(self) -> None:
        """Tell the signal that a step has begun, where it observes it."""
        if self._round.begin_step() and self._round.trace_due and not self._traced:
            interval = self._round.observed_steps.interval
            self._signal.begin_step(remaining=self._round.clock.remaining, interval=interval)
            self._traced = True

    @property
    def _number(self) -> int:
        return self._round.clock.steps_done

    # ------------------------------------------------------------------------------------------- domain by domain

    @contextmanager
    def domain(self, part: DomainBatch) -> Generator[DomainScope]:
        """Add the gradient that is computed inside to its domain's trace and to the weighted sum.

        Yields:
            The scope that records the loss.
        """
        index = self._round.weights.index(part.domain)
        self._round.expect_intact()
        self._round.expect_no_validation_due()
        self._given.expect_domain(part, self._number)
        self._keep_skipped()
        row_counts = self._round.row_counts
        with (
            row_counts.observe(part.count, self._parameters.model) as rows,
            self._collector.collect(part, self._number) as scope,
        ):
            yield scope
        with self._parameters.full_precision():
            if self._results.accept_domain(scope, self._number, part.fraction * part.rank_scale):
                expect_recorded(self._signal, scope)
                self._begin()
                self._add_domain(index, scope)
            scope.gradients = []  # so that a kept scope does not keep its gradient alive
        row_counts.add(index, rows())
        self._given.add_domain(part)

    def _add_domain(self, index: int, scope: DomainScope) -> None:
        part, signal = scope.batch, self._signal
        weight, scale = float(self._round.weights.values[index]), part.fraction / part.probability
        fraction = part.fraction * part.rank_scale
        if self._traced:
            # A signal refuses a gradient before it changes anything.
            with self._round.indivisible(unless=(ValueError,)):
                signal.fold(index, scope.gradients, scale=scale, weight=weight, rows=part.count)
        with self._round.indivisible():
            factor = signal.domain_factor(index) if isinstance(signal, DomainFactors) else 1.0
            self.sum.add(scope.gradients, weight * scale * factor)
            if self._traced and scope.losses:
                losses, reference = scope.recorded()
                signal.record_loss(index, losses, fraction=fraction, reference=reference)
            if self._round.readings.at_once and scope.loss is not None:
                self._losses.append((part.domain, float(scope.loss), fraction))

    # ------------------------------------------------------------------------------------------- mixed batches

    @contextmanager
    def batch(
        self, given: MixtureBatch | RowLabels, expected_counts: Mapping[str, float] | None
    ) -> Generator[BatchScope]:
        """Accumulate the gradient that is computed inside on the parameters, and pass the losses to the signal.

        Yields:
            The scope that weights the losses.
        """
        self._round.expect_intact()
        self._round.expect_no_validation_due()
        names, batch, counted_rows = self._names, None, None
        if isinstance(given, MixtureBatch):
            if expected_counts is not None:
                raise ValueError("expected_counts goes with labels; a MixtureBatch has its own")
            batch, expected_counts = given, given.expected_counts
            places = np.array([self._round.weights.index(name) for name in given.names])
            numbers = places[domain_numbers(given.labels, given.names)]
            counted_rows = None if given.counted is None else given.counted.cpu().numpy()
        else:
            numbers = domain_numbers(given, names)
        groups, counted = RowGroups(numbers, len(names)), expected_counts is not None
        counts = groups.counts_where(counted_rows)
        expected = resolve_expected(counts, names, expected_counts)
        present = np.flatnonzero(counts).tolist()
        self._given.expect_batch(batch, present, self._number, counted=counted)
        first = not self._given.mixed
        self._collector.expect_ready("batch", first=first)
        weights = np.maximum(self._round.weights.values, _LEAST_WEIGHT)
        self._begin()
        capture = self._signal.capture(groups, weights) if self._traced else nullcontext(CaptureContext())
        self._keep_skipped()
        self._given.mixed = True
        try:
            with self._collector.accumulate("batch", self._number), capture as context:
                scope = BatchScope(groups, expected, weights, context, self._signal, counted_rows)
                yield scope
            result = self._results.of_batch(scope, self._number, traced=self._traced)
            self._lost |= result.lost
            if self._traced and scope.recorded is not None and not result.lost:
                record_rows(self._signal, names, scope, batch)
        except BaseException:
            self.abandon()
            raise
        self._losses += result.losses
        for index in present:
            self._round.row_counts.add(index, int(counts[index]))
        self._given.add_batch(batch, present, counted=counted)

    # ------------------------------------------------------------------------------------------- the whole step

    def auxiliary(self) -> AbstractContextManager[DomainScope]:
        """Return a block whose gradient is added with weight 1."""
        self._round.expect_intact()
        if not self._given or self._prepared:
            raise RuntimeError(
                "mixer.auxiliary() belongs to a step: enter it after the step's first block of mixer.domain or "
                "mixer.batch, and before mixer.step()"
            )
        self._keep_skipped()
        add = self._auxiliary.add_to_batches if self._given.mixed else self._auxiliary.add_to_sum
        return add(self._number)

    def _expect_ready(self, call: str, *, clipped: bool = False) -> None:
        """Raise if the calls are out of order, a domain or a micro-batch is missing, or the optimizer changed.

        Args:
            clipped: whether a trainer has clipped the gradients; otherwise nothing outside of the blocks may
                change them.
        """
        self._collector.expect_closed(call)
        if self._prepared:
            raise RuntimeError(
                f"{call} after mixer.before_step(): call optimizer.step() and mixer.after_step()"
            )
        self._round.expect_intact()
        self._round.expect_no_validation_due()
        self._given.expect_complete(self._number)
        if not clipped:
            self._collector.expect_untouched(call)
        self._parameters.expect_all_of(unwrap_optimizer(self._optimizer))

    def take(self) -> None:
        """Combine the gradients, and let the optimizer step with them; the parameters have none afterwards."""
        self._expect_ready("mixer.step()")
        try:
            if self._combine(None, None):
                with self._parameters.full_precision(), torch.enable_grad(), self._round.indivisible():
                    self._optimizer.step()
            else:
                self._skip()
        finally:
            self._parameters.clear_gradients()
        self._end()

    def prepare(self, *, norm: float | Tensor | None, clip_norm: float | None) -> None:
        """Combine the gradients; the optimizer steps next.

        Args:
            norm: the norm before the gradient was clipped elsewhere, to ``clip_norm``.
        """
        self._expect_ready("mixer.before_step()", clipped=clip_norm is not None)
        if clip_norm is not None and self.clip_norm is not None:
            raise ValueError(
                f"the gradient is clipped to {clip_norm:g} by the trainer and to {self.clip_norm:g} by the "
                "mixer; leave out one of them"
            )
        if not self._combine(norm, clip_norm):
            self._parameters.clear_gradients()
            self._skip()
        self._prepared = True

    def finish(self) -> None:
        """End a step after :meth:`prepare` and the optimizer's step."""
        if not self._prepared:
            raise RuntimeError(
                "mixer.after_step() without mixer.before_step(): call it before optimizer.step()"
            )
        self._parameters.clear_gradients()
        self._end()

    def _combine(self, norm: float | Tensor | None, clip_norm: float | None) -> bool:
        """Put the combined gradient into ``.grad``, clip it, and pass it to the signal.

        Returns:
            Whether there is a gradient; where not, the step is skipped.
        """
        try:
            return self._combined(norm, clip_norm)
        except BaseException:
            self.abandon()
            raise

    def _combined(self, norm: float | Tensor | None, clip_norm: float | None) -> bool:
        with self._parameters.full_precision():
            if self._averaged and not self._given.mixed:
                self._begin()  # also where this rank has no rows
            if not self._reduce():
                return False
            if self._given.mixed:
                self._collector.expect_gradient("batch", self._number)
                combined: Gradients = [p.grad for p in self._parameters.tensors]
            else:
                combined = self.sum.gradients
                for parameter, gradient in zip(self._parameters.tensors, combined, strict=True):
                    parameter.grad = gradient
            if self.clip_norm is not None:
                clip_norm = self.clip_norm
                norm = torch.nn.utils.clip_grad_norm_(self._parameters.tensors, clip_norm)
            if norm is not None:
                norm = distributed.full_tensor(
                    norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)
                )
                if not self._results.norm_is_finite(norm, self._number):
                    return False
            if self._traced:
                self._folded = True
                extra = self.sum.gradients if self._given.mixed and self.sum else None
                step = Combined.of(combined, norm, clip_norm, extra, at_once=self._round.readings.at_once)
                self._signal.end_step(step if self._signal.clips_on_device else step.on_host())
            elif self._round.begun:
                self._signal.skip_step()
            return True

    def _skip(self) -> None:
        """Leave nothing of a step that the optimizer does not take; all ranks must call it."""
        if distributed.any_rank(not self._can_drop, self._parameters.device):
            self._round.restart()

    def _reduce(self) -> bool:
        """Average over ranks what is averaged when a step is combined; return whether there is a gradient."""
        if self._given.mixed:
            if self._nonfinite.policy == "skip":
                # A value that is not finite on one rank has reached the gradients of all.
                self._lost = distributed.any_rank(self._lost, self._parameters.device)
            return not self._lost
        if self._averaged:
            self.sum.all_reduce()
            distributed.broadcast_buffers(self._parameters.model)
        return bool(self.sum)

    def _end(self) -> None:
        for name, loss, fraction in self._losses:
            self._round.losses.add(name, loss, fraction)
        self.clear()
        self._round.end_step()
