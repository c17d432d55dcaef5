"""Which parts of a training step were given, and whether it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mixwell.mixer.batch import DomainBatch, MixtureBatch

# The rounding that is allowed in fractions that sum to one.
TOLERANCE = 1e-6


@final
class StepProgress:
    """The parts of one step: fractions of the domains' batches, or mixed batches.

    Args:
        names: the domains, or ``("validation",)`` for a validation gradient.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._fractions: dict[str, float] = {}
        self._absent: frozenset[str] = frozenset()
        self._batch_fraction: float | None = None
        self._counted = False
        self.mixed = False
        """Whether mixed batches are given."""

    def __bool__(self) -> bool:
        return self.mixed or bool(self._fractions)

    def fraction(self, name: str) -> float:
        """Return the fraction of a domain's batch that was given."""
        return self._fractions.get(name, 0.0)

    def complete(self, name: str) -> bool:
        """Return whether the whole batch of a domain was given."""
        return self.fraction(name) >= 1 - TOLERANCE

    @property
    def any_number_of_batches(self) -> bool:
        """Whether the number of batches of the step is not known, so that a lost one would not be missed."""
        return self._counted and self._batch_fraction is None

    def expect_domain(self, part: DomainBatch, step: int) -> None:
        """Raise if a part of a domain's batch cannot be added."""
        if self.mixed:
            raise _two_ways()
        total = self.fraction(part.domain) + part.fraction
        if total > 1 + TOLERANCE:
            raise ValueError(
                f"{part.domain!r} is given twice in step {step}: its fractions sum to {total:g}. Call "
                "mixer.step() between steps; for several micro-batches in one step give each its fraction, as in "
                "mixer.domain(name, fraction=1/4)"
            )

    def add_domain(self, part: DomainBatch) -> None:
        """Add a part of a domain's batch."""
        self._fractions[part.domain] = self.fraction(part.domain) + part.fraction
        self._absent |= part.absent

    def expect_batch(
        self, batch: MixtureBatch | None, present: Sequence[int], step: int, *, counted: bool
    ) -> None:
        """Raise if a mixed batch cannot be added.

        Args:
            batch: has its fraction of the step; ``None`` where only labels are known.
            counted: whether the expected counts of the step are known, so that it may have several batches.
        """
        if self._fractions and not self.mixed:
            raise _two_ways()
        if batch is not None:
            if (self._batch_fraction or 0.0) + batch.fraction > 1 + TOLERANCE:
                raise ValueError(
                    f"a batch too many in step {step}: call mixer.step() after the "
                    f"{batch.step.micro_batches} micro-batches of a step"
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

    def add_batch(self, batch: MixtureBatch | None, present: Sequence[int], *, counted: bool) -> None:
        """Add a mixed batch; arguments as for :meth:`expect_batch`."""
        self._counted = counted
        if batch is not None:
            self._batch_fraction = (self._batch_fraction or 0.0) + batch.fraction
        elif not counted:
            for name in (self._names[index] for index in present):
                self._fractions[name] = self.fraction(name) + 1

    def expect_complete(self, step: int) -> None:
        """Raise a ValueError if a domain or a micro-batch is missing."""
        if self._batch_fraction is not None:
            if self._batch_fraction < 1 - TOLERANCE:
                raise ValueError(
                    f"the micro-batches of step {step} are {self._batch_fraction:g} of it: give all of "
                    "them to mixer.batch before mixer.step()"
                )
            return
        if self._counted:
            return
        for name in self._names:
            if name not in self._fractions and name not in self._absent:
                remedy = (
                    "where a batch need not have rows of every domain, give the batches of a MixtureLoader, or "
                    "mixer.batch(labels, expected_counts=...) with the number of rows of each domain that a step "
                    "has on average"
                    if self.mixed
                    else f"run it in `with mixer.domain({name!r}):`. A domain that is not in every step needs "
                    "batches that say so: those of a MixtureLoader, or DomainBatch(..., probability=...) where it "
                    "is there and DomainBatch(..., absent=...) of another where it is not"
                )
                raise ValueError(f"domain {name!r} is missing in step {step}: {remedy}")
            if name in self._fractions and not self.complete(name):
                raise ValueError(
                    f"the fractions of domain {name!r} in step {step} sum to {self.fraction(name):g}, not 1"
                )


def _two_ways() -> RuntimeError:
    return RuntimeError("mixer.batch and mixer.domain cannot be used in one step; call mixer.step() between")
