"""TANDEM: weight for domains whose loss falls where a twin of the model also learns from the validation set."""

from __future__ import annotations

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Positive,
    Recipe,
    Task,
    Whole,
    batch_of_each,
    validation_batch,
)
from mixwell.utils.costs import FORWARD


class TandemOptions(Options):
    """Of TANDEM."""

    step_size: Positive = 5.0
    """Step size of the weights, the paper's eta_alpha: `w <- Proj(w - eta h)`; losses differ by hundredths."""
    probe_steps: Whole = 5
    """K, steps with a twin before each update; the other steps of a round are free."""
    gamma: Positive = 1.0
    """How much the training loss counts for the twin beside the validation loss."""
    learning_rate: Positive | None = None
    """Of the twin; by default that of the optimizer in the same step."""


def recipe(task: Task) -> Recipe:
    """Projected gradient descent on what the twins differ by.

    Args:
        task: with :class:`TandemOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.twin_networks import TwinNetworks
    from mixwell.simplex.updates import ProjectedDescent

    options: TandemOptions = task.options
    signal = TwinNetworks(
        probe_steps=options.probe_steps, gamma=options.gamma, learning_rate=options.learning_rate
    )
    return Recipe(signal, ProjectedDescent(options.step_size))


def extra(task: Task) -> Extra:
    """In each of K steps a validation batch and a batch of each domain, then two losses of each domain.

    Args:
        task: with :class:`TandemOptions`.

    Returns:
        What it computes in a round.
    """
    options: TandemOptions = task.options
    horizon = METHODS[0].length(task.mixer.horizon, task.steps)
    each = batch_of_each(task)
    return Extra(
        per_round=min(options.probe_steps, horizon) * (validation_batch(task) + each) + 2 * FORWARD * each
    )


METHODS = (
    Method(
        name="tandem",
        kind="online",
        line="a twin that also learns from the validation set says which domains' losses fall with the target's",
        paper="Wang, Xiang, Xu, Yi et al. 2025, arXiv:2606.04401",
        needs=Needs(validation=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=recipe,
        options=TandemOptions,
        extra=extra,
    ),
)
