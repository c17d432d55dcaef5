"""Meta-Weight-Net: a network learns from the validation set how much a row of a given loss should count."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    NotNegative,
    Options,
    Positive,
    Recipe,
    Task,
    Whole,
    batch_of_each,
    every_step,
    validation_batch,
)
from mixwell.methods.learning_to_reweight import row_recipe


class MetaWeightNetOptions(Options):
    """Of Meta-Weight-Net."""

    level: Literal["rows", "domains"] = "rows"
    """`rows` weighs every row of a step (the paper); `domains` weighs each domain by its first weight times the
    mean of what its rows would count."""
    normalize: bool = False
    """Divide the weights of a batch by their mean, in the virtual and the real steps (early public code does)."""
    hidden: Whole = 100
    """Width of the network's hidden layer."""
    learning_rate: Positive = 1e-3
    """Of the network's Adam."""
    weight_decay: NotNegative = 1e-4
    """Of the network's Adam."""


def recipe(task: Task) -> Recipe:
    """Rows, or domains, weighted by a network of the rows' losses.

    Args:
        task: with :class:`MetaWeightNetOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.loss_network import LossNetwork

    options: MetaWeightNetOptions = task.options
    return row_recipe(LossNetwork(**options.model_dump(), seed=task.seed), options.level)


def extra(task: Task) -> Extra:
    """In every round a virtual step, a validation gradient where it ends, and a pass in forward mode.

    Args:
        task: of a run.

    Returns:
        A gradient each.
    """
    return Extra(per_round=2 * batch_of_each(task) + validation_batch(task))


METHODS = (
    Method(
        name="meta-weight-net",
        kind="online",
        line="a network learns what a row of a given loss should count, through a virtual training step",
        paper="Shu, Xie, Yi, Zhao, Zhou, Xu, Meng 2019, arXiv:1902.07379",
        needs=Needs(validation=True, row_losses=True, domains=1),
        memory="a network of 301 numbers; in a virtual step a copy of the parameters and three gradients",
        recipe=recipe,
        options=MetaWeightNetOptions,
        horizon=every_step,
        extra=extra,
    ),
)
