"""Learning to Reweight: rows whose gradients help the validation set count, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mixwell.methods.base import Extra, Method, Needs, Options, Recipe, Task, every_step, validation_batch

if TYPE_CHECKING:
    from mixwell.signals import Signal


class LearningToReweightOptions(Options):
    """Of Learning to Reweight."""

    level: Literal["rows", "domains"] = "rows"
    """`rows` weighs every row of a step (the paper); `domains` weighs each domain by its first weight times the
    mean of what its rows would count."""


def recipe(task: Task) -> Recipe:
    """Rows, or domains, weighted by their alignment with the validation gradient.

    Args:
        task: with :class:`LearningToReweightOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.row_alignment import RowAlignment

    options: LearningToReweightOptions = task.options
    return row_recipe(RowAlignment(options.level), options.level)


def row_recipe(signal: Signal, level: str) -> Recipe:
    """A signal that weighs rows, or gives domains the weights that their rows would have.

    Args:
        signal: the signal.
        level: ``rows``, where all scores are zero and the domains' weights stay, or ``domains``.

    Returns:
        The recipe.
    """
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    return Recipe(signal, SoftmaxWeights() if level == "domains" else MirrorDescent(1.0))


def extra(task: Task) -> Extra:
    """In every step a pass in forward mode over its rows, and before the first a validation gradient.

    Args:
        task: of a run.

    Returns:
        A gradient each: forward mode takes the matrix products that a gradient takes.
    """
    return Extra(before=validation_batch(task), per_step=1.0)


METHODS = (
    Method(
        name="learning-to-reweight",
        kind="online",
        line="a row counts by the alignment of its gradient with the validation gradient, at every step",
        paper="Ren, Zeng, Yang, Urtasun 2018, arXiv:1803.09050",
        needs=Needs(validation=True, row_losses=True, domains=1),
        memory="one gradient",
        recipe=recipe,
        options=LearningToReweightOptions,
        horizon=every_step,
        extra=extra,
    ),
)
