"""Recipes, the parts of a mixer that a named method chooses, and the registry of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, final

from typing_extensions import Unpack

from mixwell.utils.registry import Registry

if TYPE_CHECKING:  # so that listing the methods does not import torch
    from mixwell.signals import Signal
    from mixwell.simplex.constraints import Constraint
    from mixwell.simplex.updates import Update

HorizonSetting = int | Literal["auto", "long"]
"""T of a method: steps, its authors' choice, or the paper's ``ceil(sqrt(N log N))``."""


@final
@dataclass(frozen=True)
class Recipe:
    """A method for one run: signal, update, constraints.

    Args:
        constraints: are added to those of the settings.
        weights: initial weights by domain, where the method sets them.
    """

    signal: Signal
    update: Update | float | None = None
    constraints: Sequence[Constraint] = ()
    weights: Mapping[str, float] | None = None


class LoopSettings(TypedDict):
    """The settings of a training loop that :meth:`mixwell.Mixer.from_method` passes to a method."""

    budget: int
    horizon: HorizonSetting
    options: Mapping[str, Any]
    rows: Mapping[str, int]
    batch_rows: int
    warmup: int
    step_size: float | Literal["auto"]
    seed: int


class MixingMethod(Protocol):
    """The interface of a method for :meth:`mixwell.Mixer.from_method`."""

    def round_length(self, chosen: HorizonSetting, steps: int) -> int:
        """Return T of a run of N steps."""
        ...

    def loop_recipe(self, domains: Sequence[str], **settings: Unpack[LoopSettings]) -> Recipe:
        """Return the method's recipe for a training loop outside of ``mixwell run``."""
        ...


METHODS: Registry[MixingMethod] = Registry("method", package="mixwell.methods")
"""By name; modules of :mod:`mixwell.methods` register theirs, and other packages may add some."""
