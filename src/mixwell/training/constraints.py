"""The constraints of the runner: each owns some keys of the section ``mixer``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, final

from pydantic import model_validator
from typing_extensions import override

from mixwell.simplex.constraints import Cap, Constraint, Floor, PriorPull
from mixwell.simplex.repetition import EpochCap
from mixwell.utils.registry import Registry
from mixwell.utils.sections import ConfigSection, NotNegative, Positive, Share


@final
@dataclass(frozen=True)
class ConstraintContext:
    """What a constraint needs to know of a run.

    Args:
        rows: that each domain has.
        batch_rows: rows of a training step.
        steps: N, training steps of the run.
    """

    rows: Mapping[str, int]
    batch_rows: int
    steps: int


class ConstraintConfig(ConfigSection):
    """Keys of the section ``mixer``, with defaults that constrain nothing. A mapping among them is by domain."""

    limits_rows: ClassVar[bool] = False
    """Whether the loader, too, respects the constraint, so that it applies to fixed weights."""

    @abstractmethod
    def build(self, run: ConstraintContext) -> Constraint | None:
        """Return the constraint, or ``None`` where the keys have their defaults."""


CONSTRAINTS = Registry[type[ConstraintConfig]]("constraint")
"""Sections by the name of their first key. ``mixer`` has the keys of all of them."""


@final
@CONSTRAINTS.register("max_epochs")
class EpochCapConfig(ConstraintConfig):
    """A limit on repetition."""

    limits_rows = True

    max_epochs: Positive | dict[str, Positive] | None = None
    """How often the rows of a domain may be seen, for all domains or by domain."""

    @override
    def build(self, run: ConstraintContext) -> Constraint | None:
        if self.max_epochs is None:
            return None
        return EpochCap(run.rows, self.max_epochs, batch_size=run.batch_rows, budget=run.steps)


@final
@CONSTRAINTS.register("floor")
class FloorConfig(ConstraintConfig):
    """A lower bound."""

    floor: Share | dict[str, Share] = 0.0
    """The smallest weight, for all domains or by domain."""

    @override
    def build(self, run: ConstraintContext) -> Constraint | None:
        return None if self.floor == 0 else Floor(self.floor)


@final
@CONSTRAINTS.register("cap")
class CapConfig(ConstraintConfig):
    """An upper bound."""

    cap: Share | dict[str, Share] = 1.0
    """The largest weight, for all domains or by domain."""

    @override
    def build(self, run: ConstraintContext) -> Constraint | None:
        return None if self.cap == 1 else Cap(self.cap)


@final
@CONSTRAINTS.register("prior")
class PriorConfig(ConstraintConfig):
    """A pull towards given weights."""

    prior: dict[str, Positive] | None = None
    """Weights that the mixture is pulled towards."""
    prior_strength: NotNegative = 0.0
    """The strength of the pull, in units of the validation loss."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.prior is None) != (self.prior_strength == 0):
            raise ValueError("mixer.prior and mixer.prior_strength belong together: give both, or neither")
        return self

    @override
    def build(self, run: ConstraintContext) -> Constraint | None:
        return None if self.prior is None else PriorPull(self.prior, self.prior_strength)
