"""The paper's method, which is ours: fewer weight updates, each over a longer horizon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mixwell.methods.base import Method, Needs, Options, Positive, Recipe, Task, Whole
from mixwell.simplex.horizons import DEFAULT
from mixwell.simplex.repetition import EPOCHS_AHEAD, EpochPace
from mixwell.simplex.rounds import POINTS, SPAN
from mixwell.simplex.updates import FACTOR

if TYPE_CHECKING:
    from mixwell.signals import Hypergradient, Signal
    from mixwell.simplex.constraints import Constraint


class MixwellOptions(Options):
    """Of the default method."""

    points: Whole = POINTS
    """Validation gradients of a round, at as many iterates of its later part; 1 is the paper's, at its end."""
    span: Annotated[float, Field(gt=0, le=1)] = SPAN
    """The part of the round, at its end, in which they are taken."""
    factor: Positive = FACTOR
    """Multiplies the self-tuned step size."""
    shrink: bool = True
    """Whether self-tuned steps are shortened by the noise of the scores."""
    epochs_ahead: Annotated[float, Field(ge=1)] | None = EPOCHS_AHEAD
    """How often the rest of the run may show the rows of a domain at its weight; null for no limit."""


def signal(task: Task, *, points: int = 1, span: float = SPAN, window: int | None = None) -> Hypergradient:
    """The signal that settings ask for.

    Args:
        task: of a run.
        points: validation gradients of a round.
        span: the part of the round in which they are taken.
        window: how many of a round's last steps count; ``None`` for all.

    Returns:
        A new one.
    """
    from mixwell.hypergradient.traces import TRACES
    from mixwell.signals import Hypergradient

    traces = TRACES.get(task.traces)(task.mixer)
    return Hypergradient(task.mixer.curvature, traces, points=points, span=span, window=window)


def averaged_signal(task: Task) -> Hypergradient:
    """The signal of the default method.

    Args:
        task: with :class:`MixwellOptions`.

    Returns:
        A new one.
    """
    options: MixwellOptions = task.options
    return signal(task, points=options.points, span=options.span)


def recipe(task: Task) -> Recipe:
    """Mirror descent along the hypergradient of a round (Algorithm 3), averaged over iterates of the round.

    Args:
        task: with :class:`MixwellOptions`.

    Returns:
        The recipe.
    """
    from mixwell.simplex.updates import SelfTunedMirrorDescent

    options: MixwellOptions = task.options
    made = replace(descent(task, averaged_signal(task)), constraints=_pace(task, options.epochs_ahead))
    if made.update is not None:
        return made
    update = SelfTunedMirrorDescent(options.factor, shrink=options.shrink)
    return replace(made, update=update)


def _pace(task: Task, epochs: float | None) -> list[Constraint]:
    """The limit on repetition, where it is known how many rows there are."""
    known = task.batch_rows > 0 and task.rows.keys() >= set(task.domains)
    if epochs is None or not known:
        return []
    return [EpochPace(task.rows, epochs, batch_size=task.batch_rows, budget=task.steps)]


def descent(task: Task, found: Signal) -> Recipe:
    """Mirror descent along a hypergradient, with the step size of the settings.

    Args:
        task: of a run.
        found: the signal that estimates it.

    Returns:
        The recipe.
    """
    step_size = task.mixer.step_size
    return Recipe(found, None if step_size == "auto" else step_size)


METHODS = (
    Method(
        name="mixwell",
        kind="online",
        line="mirror descent along an approximate hypergradient that looks back over all T steps of a round",
        paper="Das, Patel, Razaviyayn, Mirrokni, Less is More: fewer data weight updates over longer horizon",
        needs=Needs(validation=True),
        memory="one trace per domain: a copy of the parameters, half of one, or a sketch",
        recipe=recipe,
        options=MixwellOptions,
        horizon=DEFAULT.length,
    ),
)
