"""The paper's method: fewer weight updates, each over a longer horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe
from mixwell.simplex.horizons import DEFAULT
from mixwell.simplex.repetition import EPOCHS_AHEAD, EpochPace
from mixwell.simplex.rounds import POINTS, SPAN
from mixwell.simplex.updates import FACTOR

if TYPE_CHECKING:
    from mixwell.signals import Hypergradient, Signal
    from mixwell.simplex.constraints import Constraint


class MixwellOptions(base.Options):
    """Settings of the default method."""

    points: base.Whole = POINTS
    """Validation gradients of a round, at iterates of its later part; 1, at its end, is the paper's."""
    span: Annotated[float, Field(gt=0, le=1)] = SPAN
    """The last part of the round, in which they are taken."""
    factor: base.Positive = FACTOR
    """Multiplies the self-tuned step size."""
    shrink: bool = True
    """Whether self-tuned steps are shortened by the noise of the scores."""
    epochs_ahead: Annotated[float, Field(ge=1)] | None = EPOCHS_AHEAD
    """The most epochs over a domain that its weight may imply for the rest of the run; null for no limit."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return base.HYPERGRADIENT_SETTINGS

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        at_end = {"span"} if self.points == 1 else set[str]()
        return frozenset(at_end | ({"factor", "shrink"} if step_size else set()))


def signal(
    context: MethodContext, *, points: int = 1, span: float = SPAN, window: int | None = None
) -> Hypergradient:
    """Return a new hypergradient with the curvature and traces of the settings."""
    from mixwell.signals import Hypergradient

    traces = None if context.traces is None else context.traces.build()
    return Hypergradient(
        context.curvature, traces, points=points, span=span, window=window, trace_every=context.trace_every
    )


def averaged_signal(context: MethodContext) -> Hypergradient:
    """Return the signal of the default method."""
    options = context.options_as(MixwellOptions)
    return signal(context, points=options.points, span=options.span)


def recipe(context: MethodContext) -> Recipe:
    """Return mirror descent along the hypergradient of a round (Algorithm 3), averaged over iterates."""
    from mixwell.simplex.updates import MirrorDescent

    options = context.options_as(MixwellOptions)
    update = context.step_size
    if update == "auto":
        update = MirrorDescent("auto", factor=options.factor, shrink=options.shrink)
    return Recipe(averaged_signal(context), update, constraints=_pace(context, options.epochs_ahead))


def _pace(context: MethodContext, epochs: float | None) -> list[Constraint]:
    """Return the limit on repetition, where the number of rows is known."""
    known = context.batch_rows > 0 and context.rows.keys() >= set(context.domains)
    if epochs is None or not known:
        return []
    return [EpochPace(context.rows, epochs, batch_size=context.batch_rows, budget=context.steps)]


def descent(context: MethodContext, signal: Signal) -> Recipe:
    """Return mirror descent along a hypergradient, with the step size of the settings."""
    return Recipe(signal, None if context.step_size == "auto" else context.step_size)


base.register(
    base.Method(
        name="mixwell",
        line="mirror descent along an approximate hypergradient that looks back over all T steps of a round",
        paper="Das, Patel, Razaviyayn, Mirrokni, Less is More: fewer data weight updates over longer horizon",
        needs=base.Needs(validation=True),
        memory="one trace per domain: a copy of the parameters, half of one, or a sketch",
        recipe=recipe,
        options=MixwellOptions,
        horizon=DEFAULT.length,
    ),
)
