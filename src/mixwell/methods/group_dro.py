"""Group DRO: the domain with the worst loss gets the most weight."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import Method, NotNegative, Options, Positive, Recipe, Task, every_step


class GroupDroOptions(Options):
    """Of Group DRO."""

    eta: Positive = 0.01
    """Step size of the weights, the paper's eta_q: `log w_j += eta l_j`."""
    size_adjustment: NotNegative = 0.0
    """C of `C / sqrt(rows)`, which is added to a domain's loss; small domains gain."""
    absent: Literal["zero", "last"] = "zero"
    """What a domain adds in a step that it is not in: nothing, or the loss that it was last seen with."""


def recipe(task: Task) -> Recipe:
    """Mirror ascent on the losses.

    Args:
        task: with :class:`GroupDroOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.domain_losses import DomainLosses
    from mixwell.simplex.updates import MirrorDescent

    options: GroupDroOptions = task.options
    rows = {name: task.rows[name] for name in task.domains} if options.size_adjustment else None
    return Recipe(
        DomainLosses(options.size_adjustment, rows, absent=options.absent), MirrorDescent(options.eta)
    )


METHODS = (
    Method(
        name="group-dro",
        kind="online",
        line="weight follows the loss, so that the worst domain is trained on most",
        paper="Sagawa, Koh, Hashimoto, Liang 2020, arXiv:1911.08731",
        memory="a few numbers per domain",
        recipe=recipe,
        options=GroupDroOptions,
        horizon=every_step,
    ),
)
