"""Group DRO: the domain with the worst loss gets the most weight."""

from __future__ import annotations

from typing import Literal

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe


class GroupDroOptions(base.Options):
    """Settings of Group DRO."""

    eta: base.Positive = 0.01
    """Step size of the weights, the paper's eta_q: `log w_j += eta l_j`."""
    size_adjustment: base.NotNegative = 0.0
    """C of `C / sqrt(rows)`, which is added to a domain's loss; small domains gain."""
    absent: Literal["zero", "last"] = "zero"
    """What a domain adds in a step that it is not in: nothing, or the loss that it was last seen with."""


def recipe(context: MethodContext) -> Recipe:
    """Return mirror ascent on the losses."""
    from mixwell.signals.losses import DomainLosses
    from mixwell.simplex.updates import MirrorDescent

    options = context.options_as(GroupDroOptions)
    rows = {name: context.rows[name] for name in context.domains} if options.size_adjustment else None
    return Recipe(
        DomainLosses(options.size_adjustment, rows, absent=options.absent), MirrorDescent(options.eta)
    )


base.register(
    base.Method(
        name="group-dro",
        line="weight follows the loss, so that the worst domain is trained on most",
        paper="Sagawa, Koh, Hashimoto, Liang 2020, arXiv:1911.08731",
        memory="a few numbers per domain",
        recipe=recipe,
        options=GroupDroOptions,
        horizon=base.every_step,
    ),
)
