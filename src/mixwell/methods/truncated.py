"""The hypergradient through the last steps of a round only (Shaban et al. 2019)."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.methods.mixwell import descent, signal


class TruncatedOptions(base.Options):
    """Settings of truncated back-propagation."""

    window: base.Whole = 10
    """How many of a round's last steps are differentiated."""
    curvature: Literal["isotropic", "exact"] = "isotropic"
    """`isotropic` is H = gamma I with `mixer.curvature`, as the default method has it; `exact` takes products with
    the Hessian in these steps, as published, with one batch per domain."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        unread = frozenset({"curvature", "traces", "trace_every"} if self.curvature == "exact" else ())
        return base.HYPERGRADIENT_SETTINGS - unread


def recipe(context: MethodContext) -> Recipe:
    """Return mirror descent along the hypergradient of the last steps."""
    from mixwell.hypergradient.curvature import ExactCurvature
    from mixwell.signals import Hypergradient

    options = context.options_as(TruncatedOptions)
    if options.curvature == "exact":
        found = Hypergradient(ExactCurvature(), points=1, window=options.window)
    else:
        found = signal(context, window=options.window)
    return descent(context, found)


def extra(context: MethodContext) -> Extra:
    """Return the cost: exact products, one with every trace in every step of the window; nothing otherwise."""
    options = context.options_as(TruncatedOptions)
    window = min(options.window, TRUNCATED.round_length(context.horizon, context.steps))
    products = window * len(context.domains) if options.curvature == "exact" else 0
    return Extra(per_round=2.0 * products)


TRUNCATED = base.register(
    base.Method(
        name="truncated",
        line="mirror descent along the hypergradient of a round's last steps",
        paper="Shaban, Cheng, Hatch, Boots 2019, arXiv:1810.10667",
        needs=base.Needs(validation=True),
        memory="one trace per domain: a copy of the parameters, half of one, or a sketch",
        recipe=recipe,
        options=TruncatedOptions,
        extra=extra,
    ),
)
