"""Meta-Weight-Net: a network learns from the validation set how much a row of a given loss should count."""

from __future__ import annotations

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.methods.learning_to_reweight import RowOptions, row_recipe


class MetaWeightNetOptions(RowOptions):
    """Settings of Meta-Weight-Net."""

    normalize: bool = False
    """Divide the weights of a batch by their mean, in the virtual and the real steps (early public code does)."""
    hidden: base.Whole = 100
    """Width of the network's hidden layer."""
    learning_rate: base.Positive = 1e-3
    """Of the network's Adam."""
    weight_decay: base.NotNegative = 1e-4
    """Of the network's Adam."""


def recipe(context: MethodContext) -> Recipe:
    """Return rows, or domains, weighted by a network of the rows' losses."""
    from mixwell.signals.row_network import LossNetwork

    options = context.options_as(MetaWeightNetOptions)
    return row_recipe(LossNetwork(**options.model_dump(), seed=context.seed))


def extra(context: MethodContext) -> Extra:
    """Return the cost of a virtual step, a validation gradient and a forward-mode pass in every round."""
    return Extra(per_round=2 * context.domains_cost + context.validation_cost)


base.register(
    base.Method(
        name="meta-weight-net",
        line="a network learns what a row of a given loss should count, through a virtual training step",
        paper="Shu, Xie, Yi, Zhao, Zhou, Xu, Meng 2019, arXiv:1902.07379",
        needs=base.Needs(validation=True, probes=True, row_losses=True, domains=1),
        memory="a network of 301 numbers; in a virtual step a copy of the parameters and three gradients",
        recipe=recipe,
        options=MetaWeightNetOptions,
        horizon=base.every_step,
        extra=extra,
    ),
)
