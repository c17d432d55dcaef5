"""The hypergradient through the last steps of a round only (Shaban et al. 2019)."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import Extra, Method, Needs, Options, Recipe, Task, Whole


class TruncatedOptions(Options):
    """Of truncated back-propagation."""

    window: Whole = 10
    """How many of a round's last steps are differentiated."""
    curvature: Literal["isotropic", "exact"] = "isotropic"
    """`isotropic` is H = gamma I with `mixer.curvature`, as the default method has it; `exact` takes products with
    the Hessian in these steps, as published, with one batch per domain."""


def recipe(task: Task) -> Recipe:
    """Mirror descent along the hypergradient of the last steps.

    Args:
        task: with :class:`TruncatedOptions`.

    Returns:
        The recipe.
    """
    from mixwell.hypergradient.curvature import ExactCurvature
    from mixwell.methods.hypergradient import descent, signal
    from mixwell.signals import Hypergradient

    options: TruncatedOptions = task.options
    if options.curvature == "exact":
        found = Hypergradient(ExactCurvature(), points=1, window=options.window)
    else:
        found = signal(task, window=options.window)
    return descent(task, found)


def extra(task: Task) -> Extra:
    """Nothing, but for exact products: one with every trace in every step of the window.

    Args:
        task: with :class:`TruncatedOptions`.

    Returns:
        What it computes.
    """
    options: TruncatedOptions = task.options
    window = min(options.window, METHODS[0].length(task.mixer.horizon, task.steps))
    products = window * len(task.domains) if options.curvature == "exact" else 0
    return Extra(per_round=2.0 * products)


METHODS = (
    Method(
        name="truncated",
        kind="online",
        line="mirror descent along the hypergradient of a round's last steps",
        paper="Shaban, Cheng, Hatch, Boots 2019, arXiv:1810.10667",
        needs=Needs(validation=True),
        memory="one trace per domain: a copy of the parameters, half of one, or a sketch",
        recipe=recipe,
        options=TruncatedOptions,
        extra=extra,
    ),
)
