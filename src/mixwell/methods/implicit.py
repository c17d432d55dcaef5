"""Implicit hypergradients: as if the model were trained to the end at the end of every round."""

from __future__ import annotations

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
)
from mixwell.methods.hypergradient import descent


class CgOptions(Options):
    """Of conjugate gradients."""

    iterations: Whole = 10
    """At most so many products with the Hessian in a round; fewer where the curvature is not positive."""
    damping: NotNegative = 0.1
    """lambda of `(H + lambda I)^-1`."""
    warm: bool = False
    """Start where the round before ended."""


class NeumannOptions(Options):
    """Of the Neumann series."""

    iterations: Whole = 10
    """Terms of the series; one product with the Hessian less."""
    damping: NotNegative = 0.0
    """lambda of `(H + lambda I)^-1`."""
    learning_rate: Positive | None = None
    """eta of `eta sum_i (I - eta (H + lambda I))^i`; by default that of the optimizer."""


class SingleLoopOptions(Options):
    """Of the single loop."""

    damping: NotNegative = 0.0
    """lambda of `(H + lambda I)^-1`."""
    learning_rate: Positive | None = None
    """eta of `v <- v - eta ((H + lambda I) v - g_V)`; by default that of the optimizer."""


def cg(task: Task) -> Recipe:
    """The inverse Hessian by conjugate gradients.

    Args:
        task: with :class:`CgOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.implicit import ImplicitGradient

    options: CgOptions = task.options
    return descent(
        task,
        ImplicitGradient("cg", iterations=options.iterations, damping=options.damping, warm=options.warm),
    )


def neumann(task: Task) -> Recipe:
    """The inverse Hessian by a Neumann series.

    Args:
        task: with :class:`NeumannOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.implicit import ImplicitGradient

    options: NeumannOptions = task.options
    signal = ImplicitGradient(
        "neumann",
        iterations=options.iterations,
        damping=options.damping,
        learning_rate=options.learning_rate,
    )
    return descent(task, signal)


def single_loop(task: Task) -> Recipe:
    """The product with the inverse Hessian as a variable of its own, which takes one step in every round.

    Args:
        task: with :class:`SingleLoopOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.implicit import ImplicitGradient

    options: SingleLoopOptions = task.options
    signal = ImplicitGradient("single-loop", damping=options.damping, learning_rate=options.learning_rate)
    return descent(task, signal)


def cg_extra(task: Task) -> Extra:
    """A gradient of each domain, and two of all for each product, of which there are at most so many.

    Args:
        task: with :class:`CgOptions`.

    Returns:
        What it computes.
    """
    options: CgOptions = task.options
    return _products(task, options.iterations + options.warm)


def neumann_extra(task: Task) -> Extra:
    """A gradient of each domain, and two of all for each product.

    Args:
        task: with :class:`NeumannOptions`.

    Returns:
        What it computes.
    """
    options: NeumannOptions = task.options
    return _products(task, options.iterations - 1)


def single_loop_extra(task: Task) -> Extra:
    """A gradient of each domain, and two of all for one product.

    Args:
        task: with :class:`SingleLoopOptions`.

    Returns:
        What it computes.
    """
    return _products(task, 1)


def _products(task: Task, count: int) -> Extra:
    return Extra(per_round=(1 + 2 * count) * batch_of_each(task))


METHODS = (
    Method(
        name="implicit-cg",
        kind="online",
        line="mirror descent along the hypergradient of the minimizer, the inverse Hessian by conjugate gradients",
        paper="Pedregosa 2016, arXiv:1602.02355; Grazzi et al. 2020, arXiv:2006.16218",
        needs=Needs(validation=True, second_order=True),
        memory="a few vectors of the parameters' size while it solves",
        recipe=cg,
        options=CgOptions,
        extra=cg_extra,
    ),
    Method(
        name="implicit-neumann",
        kind="online",
        line="mirror descent along the hypergradient of the minimizer, the inverse Hessian by a Neumann series",
        paper="Lorraine, Vicol, Duvenaud 2020, arXiv:1911.02590",
        needs=Needs(validation=True, second_order=True),
        memory="a few vectors of the parameters' size while it solves",
        recipe=neumann,
        options=NeumannOptions,
        extra=neumann_extra,
    ),
    Method(
        name="single-loop",
        kind="online",
        line="as implicit-cg, but the product with the inverse Hessian takes one step at a time beside training",
        paper="Ji, Yang, Liang 2021, arXiv:2010.07962; Dagreou et al. 2022, arXiv:2201.13409",
        needs=Needs(validation=True, second_order=True),
        memory="one vector of the parameters' size",
        recipe=single_loop,
        options=SingleLoopOptions,
        horizon=every_step,
        extra=single_loop_extra,
    ),
)
