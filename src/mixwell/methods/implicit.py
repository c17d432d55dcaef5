"""Implicit hypergradients: as if the model were trained to the end at the end of every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.methods.mixwell import descent

if TYPE_CHECKING:
    from mixwell.signals.implicit_gradient import Solver


class ImplicitOptions(base.Options):
    """What the settings of all three have in common."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights", "step_size", "validation_rows"})


class SingleLoopOptions(ImplicitOptions):
    """Settings of the single loop."""

    damping: base.NotNegative = 0.0
    """lambda of `(H + lambda I)^-1`."""
    learning_rate: base.Positive | None = None
    """eta of `v <- v - eta ((H + lambda I) v - g_V)`; by default that of the optimizer."""


class CgOptions(ImplicitOptions):
    """Settings of conjugate gradients."""

    iterations: base.Whole = 10
    """The largest number of Hessian products in a round; fewer where the curvature is not positive."""
    damping: base.NotNegative = 0.1
    """lambda of `(H + lambda I)^-1`."""
    warm: bool = False
    """Start at the last round's solution."""


class NeumannOptions(ImplicitOptions):
    """Settings of the Neumann series."""

    iterations: base.Whole = 10
    """Terms of the series; one Hessian product less."""
    damping: base.NotNegative = 0.0
    """lambda of `(H + lambda I)^-1`."""
    learning_rate: base.Positive | None = None
    """eta of `eta sum_i (I - eta (H + lambda I))^i`; by default that of the optimizer."""


def _recipe(solver: Solver) -> Callable[[MethodContext], Recipe]:
    def recipe(context: MethodContext) -> Recipe:
        from mixwell.signals.implicit_gradient import ImplicitGradient

        return descent(context, ImplicitGradient(solver, **context.options.model_dump()))

    return recipe


def _extra(products: Callable[[Any], int]) -> Callable[[MethodContext], Extra]:
    """Return the cost of a gradient of each domain, and of two for each Hessian product."""
    return lambda context: Extra(per_round=(1 + 2 * products(context.options)) * context.domains_cost)


base.register(
    base.Method(
        name="implicit-cg",
        line="mirror descent along the hypergradient of the minimizer, the inverse Hessian by conjugate gradients",
        paper="Pedregosa 2016, arXiv:1602.02355; Grazzi et al. 2020, arXiv:2006.16218",
        needs=base.Needs(validation=True, probes=True, second_order=True),
        memory="a few vectors of the parameters' size while it solves",
        recipe=_recipe("cg"),
        options=CgOptions,
        extra=_extra(lambda options: options.iterations + options.warm),
    ),
    base.Method(
        name="implicit-neumann",
        line="mirror descent along the hypergradient of the minimizer, the inverse Hessian by a Neumann series",
        paper="Lorraine, Vicol, Duvenaud 2020, arXiv:1911.02590",
        needs=base.Needs(validation=True, probes=True, second_order=True),
        memory="a few vectors of the parameters' size while it solves",
        recipe=_recipe("neumann"),
        options=NeumannOptions,
        extra=_extra(lambda options: options.iterations - 1),
    ),
    base.Method(
        name="single-loop",
        line="as implicit-cg, but the product with the inverse Hessian takes one step in every round",
        paper="Ji, Yang, Liang 2021, arXiv:2010.07962; Dagreou et al. 2022, arXiv:2201.13409",
        needs=base.Needs(validation=True, probes=True, second_order=True),
        memory="one vector of the parameters' size",
        recipe=_recipe("single-loop"),
        options=SingleLoopOptions,
        horizon=base.every_step,
        extra=_extra(lambda options: 1),
    ),
)
