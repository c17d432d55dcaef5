"""Dynamic batch loading: domains that are behind the losses of a reference model get more weight."""

from __future__ import annotations

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Positive,
    Recipe,
    Stages,
    Steps,
    Task,
    steps_of,
)
from mixwell.methods.doremi import trained_reference
from mixwell.methods.pike import hundredth
from mixwell.utils.costs import FORWARD


class DynamicLoadingOptions(Options):
    """Of dynamic batch loading."""

    step_size: Positive = 1.0
    """Of the weights: `w_j ~ w_j exp(step_size Delta_j)`; the authors' is 1."""
    reference: str | None = None
    """The directory of a run whose last checkpoint is the reference model; by default one is trained first, with
    `mixer.weights` kept."""
    reference_steps: Steps = "auto"
    """Training steps of that; `auto` is as many as the run has."""


def recipe(task: Task) -> Recipe:
    """Mirror ascent on how far each domain is behind, on average over a round.

    Args:
        task: with :class:`DynamicLoadingOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.excess_losses import ExcessLosses
    from mixwell.simplex.updates import MirrorDescent

    options: DynamicLoadingOptions = task.options
    horizon = METHODS[0].length(task.mixer.horizon, task.steps)  # the signal sums over the steps of a round
    return Recipe(ExcessLosses("domain"), MirrorDescent(options.step_size / horizon))


def stages(task: Task) -> Stages:
    """A reference model, where none is given.

    Args:
        task: with :class:`DynamicLoadingOptions`.

    Yields:
        The reference.

    Returns:
        Where it is.
    """
    options: DynamicLoadingOptions = task.options
    if options.reference is not None:
        return {}
    reference = yield from trained_reference(task, options.reference_steps, model={})
    return {"options": {**options.model_dump(), "reference": reference}}


def extra(task: Task) -> Extra:
    """The reference model, and its forward passes.

    Args:
        task: with :class:`DynamicLoadingOptions`.

    Returns:
        In training steps.
    """
    options: DynamicLoadingOptions = task.options
    before = 0.0 if options.reference is not None else float(steps_of(options.reference_steps, task))
    return Extra(before=before, per_step=FORWARD)


METHODS = (
    Method(
        name="dynamic-loading",
        kind="online",
        line="weight follows how far a domain's loss is above a reference model's, on average over a round",
        paper="Xia, Gao, Zeng, Chen 2023 (Sheared LLaMA), arXiv:2310.06694",
        needs=Needs(reference=True),
        memory="the reference model",
        recipe=recipe,
        options=DynamicLoadingOptions,
        horizon=hundredth,
        stages=stages,
        extra=extra,
    ),
)
