"""Learning to Reweight: rows whose gradients help the validation set count, and no others."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import Extra, Method, Needs, Options, Recipe, Task, every_step, validation_batch


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
    from mixwell.updates import Assigned, MirrorDescent

    options: LearningToReweightOptions = task.options
    # At the level of rows all scores are zero, and the domains' weights stay.
    return Recipe(
        RowAlignment(options.level), Assigned() if options.level == "domains" else MirrorDescent(1.0)
    )


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
