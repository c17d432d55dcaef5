"""UniMax: as uniform as the sizes of the domains allow."""

from __future__ import annotations

from collections.abc import Sequence

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe
from mixwell.methods.static import KnownMixtureOptions


class UniMaxOptions(KnownMixtureOptions):
    """Settings of UniMax."""

    max_epochs: base.Positive = 4.0
    """N: no domain is repeated more often."""


def unimax(sizes: Sequence[float], budget: float, max_epochs: float) -> list[float]:
    """Return shares of a budget that are as uniform as possible while no domain is repeated too often.

    Domains are visited from the smallest to the largest. Each takes an equal part of the rest of the budget,
    but at most ``max_epochs`` times its size: ``U_j = min(B_left / domains left, N c_j)``, ``p_j = U_j / sum U``
    (Chung et al. 2023, arXiv:2304.09151). A budget beyond ``N sum c`` cannot be met: then ``p_j ~ c_j``, and every
    domain is repeated more than N times, all equally often.

    Args:
        sizes: c, of the domains, positive.
        budget: B, in the same unit.
        max_epochs: N.

    Returns:
        The shares, which sum to one, in the order of the sizes.

    Example:
        >>> [round(share, 4) for share in unimax([100, 200, 300, 400, 500], 1000, 1)]
        [0.1, 0.2, 0.2333, 0.2333, 0.2333]
    """
    # Written so that NaN is refused too.
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise ValueError(f"sizes must be positive numbers, one or more, got {list(sizes)}")
    if not (0 < budget < float("inf") and 0 < max_epochs < float("inf")):
        raise ValueError(f"budget and max_epochs must be positive and finite, got {budget} and {max_epochs}")
    taken = [0.0] * len(sizes)
    left = float(budget)
    for visited, j in enumerate(sorted(range(len(sizes)), key=lambda j: sizes[j])):
        taken[j] = min(left / (len(sizes) - visited), max_epochs * sizes[j])
        left -= taken[j]
    return [one / sum(taken) for one in taken]


def recipe(context: MethodContext) -> Recipe:
    """Return the shares of the run's rows, kept."""
    options = context.options_as(UniMaxOptions)
    sizes = [context.rows[name] for name in context.domains]
    if context.batch_rows < 1:
        raise ValueError("unimax divides all rows of the run; give batch_rows, the rows of a training step")
    shares = unimax(sizes, context.steps * context.batch_rows, options.max_epochs)
    return base.keep_weights(context, dict(zip(context.domains, shares, strict=True)))


base.register(
    base.Method(
        name="unimax",
        kind="static",
        line="as uniform as the domains' sizes allow when none may be repeated more than N times",
        paper="Chung et al. 2023, arXiv:2304.09151",
        needs=base.Needs(domains=1),
        recipe=recipe,
        options=UniMaxOptions,
    ),
)
