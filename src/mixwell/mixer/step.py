"""One training step: which parts of the domains' batches were computed, and the gradient they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.mixer.batch import DomainBatch, MixtureBatch
from mixwell.mixer.gradient_sum import WeightedSum
from mixwell.mixer.nonfinite import NonFiniteGuard
from mixwell.mixer.scopes import BatchScope, DomainScope
from mixwell.signals import Signal
from mixwell.signals.base import DomainFactors, LinearSignal
from mixwell.typing import Gradients

VALIDATION = "validation"
TOLERANCE = 1e-6


@final
class StepAccumulator:
    """Accumulates a training step, from domains one at a time or from mixed batches.

    Args:
        names: the domains.
        parameters: the trained parameters.
        signal: receives the gradients and losses of steps that belong to a round.
        nonfinite: decides what happens to contributions that are not finite.
        averaged: whether gradients of domains are averaged over ranks when they are combined.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Parameters,
        signal: Signal,
        nonfinite: NonFiniteGuard,
        *,
        averaged: bool,
    ) -> None:
        self._names = tuple(names)
        self._parameters, self._signal, self._nonfinite = parameters, signal, nonfinite
        self._averaged = averaged
        self.sum = WeightedSum(parameters, lazy=not signal.requirements.domain_batches, averaged=averaged)
        self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self._fractions: dict[str, float] = {}
        self._absent: frozenset[str] = frozenset()
        self.sum.clear()
        self.mixed = False
        """Whether mixed batches were given."""
        self._batch_fraction: float | None = None
        self._counted = False
        self._lost = False
        self.traced = False
        """Whether the signal knows that the step has begun."""
        self.prepared = False
        """Whether the gradients are combined, and the optimizer steps next."""

    def __bool__(self) -> bool:
        return self.mixed or bool(self._fractions)

    # ------------------------------------------------------------------------------------------- fractions

    def fraction(self, name: str) -> float:
        """Return the fraction of a domain's batch that was given so far."""
        return self._fractions.get(name, 0.0)

    def complete(self, name: str) -> bool:
        """Return whether the fractions of a domain sum to one."""
        return self.fraction(name) >= 1 - TOLERANCE

    def expect(self, part: DomainBatch, step: int) -> None:
        """Raise if a part cannot be added to the step, or is more than the whole of its domain's batch."""
        if self.mixed:
            raise _two_ways()
        total = self.fraction(part.domain) + part.fraction
        if total > 1 + TOLERANCE:
            raise ValueError(
                f"{part.domain!r} is given twice in step {step}: its fractions sum to {total:g}. Call "
                "mixer.step() between steps; for several micro-batches in one step give each its fraction, as in "
                "mixer.domain(name, fraction=1/4)"
            )

    def give(self, part: DomainBatch) -> None:
        """Count a part."""
        self._fractions[part.domain] = self.fraction(part.domain) + part.fraction
        self._absent |= part.absent

    def expect_complete(self, step: int) -> None:
        """Raise a ValueError if a domain or a micro-batch is missing."""
        if self._batch_fraction is not None:
            if self._batch_fraction < 1 - TOLERANCE:
                raise ValueError(
                    f"the micro-batches of step {step} are {self._batch_fraction:g} of it: give all of them to "
                    "mixer.batch before mixer.step()"
                )
            return
        if self._counted:
            return
        for name in self._names:
            if self.mixed and name not in self._fractions and name not in self._absent:
                raise ValueError(
                    f"domain {name!r} is missing in step {step}: where a batch need not have rows of every "
                    "domain, give the batches of a MixtureLoader, or mixer.batch(labels, expected_counts=...) "
                    "with the number of rows of each domain that a step has on average"
                )
            if name not in self._fractions and name not in self._absent:
                raise ValueError(
                    f"domain {name!r} is missing in step {step}: run it in `with mixer.domain({name!r}):`. "
                    "A domain that is not in every step needs batches that say so: those of a MixtureLoader, or "
                    "DomainBatch(..., probability=...) where it is there and DomainBatch(..., absent=...) "
                    "of another where it is not"
                )
            if name in self._fractions and not self.complete(name):
                raise ValueError(
                    f"the fractions of domain {name!r} in step {step} sum to {self.fraction(name):g}, not 1"
                )

    # ------------------------------------------------------------------------------------------- domain by domain

    def add_domain(self, index: int, scope: DomainScope, weight: float) -> None:
        """Add a domain's gradient to its trace and to the weighted sum; it is free then."""
        part = scope.batch
        scale = part.fraction / part.probability
        if self.traced:
            self._signal.fold(index, scope.gradients, scale=scale, weight=weight, rows=part.count)
        factor = self._signal.domain_factor(index) if isinstance(self._signal, DomainFactors) else 1.0
        self.sum.add(scope.gradients, weight * scale * factor)
        if self.traced and scope.losses:
            losses, reference = scope.recorded()
            fraction = part.fraction * part.rank_scale
            self._signal.record_loss(index, losses, fraction=fraction, reference=reference)

    # ------------------------------------------------------------------------------------------- mixed batches

    def expect_batch(
        self, batch: MixtureBatch | None, present: Sequence[int], step: int, *, counted: bool
    ) -> None:
        """Raise if a mixed batch cannot be added.

        Args:
            batch: with its fraction of the step; ``None`` where only labels are known.
            counted: whether the expected counts of the step are known, so that it may have several batches.
        """
        if self.sum or (self._fractions and not self.mixed):
            raise _two_ways()
        if batch is not None:
            if (self._batch_fraction or 0.0) + batch.fraction > 1 + TOLERANCE:
                raise ValueError(
                    f"a batch too many in step {step}: call mixer.step() after the {batch.step.micro_batches} "
                    "micro-batches of a step"
                )
        elif not counted:
            for index in present:
                total = self.fraction(self._names[index]) + 1
                if total > 1 + TOLERANCE:
                    raise ValueError(
                        f"{self._names[index]!r} is given twice in step {step}: its fractions sum to "
                        f"{total:g}. Call mixer.step() between steps; for several micro-batches in one step "
                        "give each the rows that the whole step has, as in mixer.batch(labels, "
                        "expected_counts={'web': 24, ...})"
                    )

    def give_batch(self, batch: MixtureBatch | None, present: Sequence[int], *, counted: bool) -> None:
        """Count a mixed batch."""
        self._counted = counted
        if batch is not None:
            self._batch_fraction = (self._batch_fraction or 0.0) + batch.fraction
        elif not counted:
            for index in present:
                self._fractions[self._names[index]] = self.fraction(self._names[index]) + 1

    def add_batch(
        self, scope: BatchScope, batch: MixtureBatch | None, step: int
    ) -> list[tuple[str, float, float]]:
        """Pass the losses of a mixed batch to the signal, and skip the step if something is not finite.

        Returns:
            The domain, the mean loss and the number of rows over the expected one, where the loss is finite.
        """
        signal = self._signal
        found = signal.non_finite() if self.traced and isinstance(signal, LinearSignal) else None
        problems = {self._names[index]: "gradient" for index in found or []}
        losses: list[tuple[str, float, float]] = []
        for index, rows, mean in scope.means():
            if np.isfinite(mean):
                losses.append((self._names[index], mean, rows / float(scope.expected[index])))
            else:
                problems[self._names[index]] = f"loss ({mean:g})"
        if self.traced and scope.recorded is not None and not problems:
            self._record_rows(scope, batch)
        if found is None and not problems:  # the signal has not looked at the gradients
            parameter = self._parameters.non_finite([p.grad for p in self._parameters.tensors])
            if parameter is not None:
                problems["batch"] = f"gradient of parameter {parameter}"
        for name, problem in problems.items():
            self._lost = True
            self._nonfinite.reject(
                name,
                f"non-finite {problem} in a row of {name!r} at step {step}, which is left out",
                "Look at that batch, or lower the learning rate",
            )
        return losses

    def _record_rows(self, scope: BatchScope, batch: MixtureBatch | None) -> None:
        assert scope.recorded is not None
        losses, reference = scope.recorded
        if self._signal.requirements.reference and reference is None:
            raise ValueError(
                f"{self._signal!r} needs the losses of a reference model: "
                "batch.weighted_loss(losses, reference=...)"
            )
        if not self._signal.requirements.losses:
            return
        losses = scope.groups.sort_rows(losses)
        reference = None if reference is None else scope.groups.sort_rows(reference)
        for index, begin, end in scope.groups.slices:
            often = 1.0 if batch is None else batch.step.probability(self._names[index])
            self._signal.record_loss(
                index,
                losses[begin:end],
                fraction=(end - begin) * often / float(scope.expected[index]),
                reference=None if reference is None else reference[begin:end],
            )

    # ------------------------------------------------------------------------------------------- the whole step

    def reduce(self) -> bool:
        """Average over ranks what is averaged when a step is combined; return whether there is a gradient."""
        if self.mixed and self._nonfinite.policy == "skip":
            # A value that is not finite on one rank has reached the gradients of all.
            self._lost = distributed.any_rank(self._lost, self._parameters.device)
        if self._averaged and not self.mixed:
            with self._parameters.full_precision():
                self.sum.all_reduce()
                distributed.broadcast_buffers(self._parameters.model)
        return bool(self.sum) or (self.mixed and not self._lost)

    def combine(
        self, step: int, *, own_clip: float | None, norm: float | None, clip_norm: float | None
    ) -> bool:
        """Put the combined gradient into ``.grad``, clip it, and pass it to the signal.

        Args:
            own_clip: clip the norm of the gradient to this.
            norm: the norm before the gradient was clipped elsewhere.
        """
        if self.mixed:
            combined: Gradients = [p.grad for p in self._parameters.tensors]
        else:
            combined = self.sum.gradients
            for parameter, gradient in zip(self._parameters.tensors, combined, strict=True):
                parameter.grad = gradient
        if own_clip is not None:
            clip_norm = own_clip
            clipped = torch.nn.utils.clip_grad_norm_(self._parameters.tensors, own_clip)
            norm = float(distributed.full_tensor(clipped))
        if norm is not None and not np.isfinite(norm):
            self._nonfinite.reject(
                "combined gradient",
                f"the norm of the combined gradient overflowed at step {step}",
                "Lower the learning rate",
            )
            return False
        clip = 1.0 if norm is None or clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        if self.traced:
            self._signal.end_step(Combined(combined, clip, norm))
        return True


def _two_ways() -> RuntimeError:
    return RuntimeError("mixer.batch and mixer.domain cannot be used in one step; call mixer.step() between")
