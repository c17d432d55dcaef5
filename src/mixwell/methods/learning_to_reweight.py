"""Learning to Reweight: only rows with gradients that help the validation set count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe

if TYPE_CHECKING:
    from mixwell.signals.row_weighting import RowWeighting


class RowOptions(base.Options):
    """Settings of methods that weight single rows."""

    level: Literal["rows", "domains"] = "rows"
    """`rows` weights every row of a step (the paper); `domains` weights each domain by its first weight times the
    mean of its rows' weights."""


class ValidatedRowOptions(RowOptions):
    """Settings of Learning to Reweight."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights", "validation_rows"})


def recipe(context: MethodContext) -> Recipe:
    """Return rows, or domains, weighted by their alignment with the validation gradient."""
    from mixwell.signals.row_alignment import RowAlignment

    return row_recipe(RowAlignment(context.options_as(RowOptions).level))


def row_recipe(signal: RowWeighting) -> Recipe:
    """Return a recipe that weights rows, or domains by the weights of their rows."""
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    # At the level of rows all scores are zero.
    return Recipe(signal, SoftmaxWeights() if signal.level == "domains" else MirrorDescent(1.0))


def extra(context: MethodContext) -> Extra:
    """Return the cost of a forward-mode pass in every step, and of a validation gradient before the first."""
    return Extra(before=context.validation_cost, per_step=1.0)


base.register(
    base.Method(
        name="learning-to-reweight",
        line="a row counts by the alignment of its gradient with the validation gradient, at every step",
        paper="Ren, Zeng, Yang, Urtasun 2018, arXiv:1803.09050",
        needs=base.Needs(validation=True, probes=True, row_losses=True, domains=1),
        memory="one gradient",
        recipe=recipe,
        options=ValidatedRowOptions,
        horizon=base.every_step,
        extra=extra,
    ),
)
