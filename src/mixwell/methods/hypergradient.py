"""The paper's method, which is ours: fewer weight updates, each over a longer horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixwell.methods.base import Method, Needs, Recipe, Task

if TYPE_CHECKING:
    from mixwell.signals import Hypergradient, Signal


def signal(task: Task, *, window: int | None = None) -> Hypergradient:
    """The signal that settings ask for.

    Args:
        task: of a run.
        window: how many of a round's last steps count; ``None`` for all.

    Returns:
        A new one.
    """
    from mixwell.signals import Hypergradient
    from mixwell.traces import BFloat16Traces, DenseTraces, ProjectedTraces, SketchedTraces

    match task.traces:
        case "projected":
            traces = ProjectedTraces(task.mixer.rank)
        case "bfloat16":
            traces = BFloat16Traces()
        case "sketched":
            traces = SketchedTraces(task.mixer.sketch_size)
        case _:
            traces = DenseTraces()
    return Hypergradient(task.mixer.curvature, traces, window=window)


def recipe(task: Task) -> Recipe:
    """Mirror descent along the hypergradient of a round (Algorithm 3).

    Args:
        task: of a run.

    Returns:
        The recipe.
    """
    return descent(task, signal(task))


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
    ),
)
