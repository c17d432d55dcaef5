"""Dynamic batch loading: domains that are behind the losses of a reference model get more weight."""

from __future__ import annotations

from mixwell.methods import base, proxies
from mixwell.methods.base import Extra, MethodContext, Recipe, Stages


class DynamicLoadingOptions(proxies.ReferenceOptions):
    """Settings of dynamic batch loading."""

    step_size: base.Positive = 1.0
    """Of the weights: `w_j ~ w_j exp(step_size Delta_j)`; the authors' is 1."""


def recipe(context: MethodContext) -> Recipe:
    """Return mirror ascent on how far each domain is behind, on average over a round."""
    from mixwell.signals.losses import ExcessLosses
    from mixwell.simplex.updates import MirrorDescent

    step_size = context.options_as(DynamicLoadingOptions).step_size
    # The signal sums over the steps of a round.
    horizon = DYNAMIC_LOADING.round_length(context.horizon, context.steps)
    return Recipe(ExcessLosses("domain"), MirrorDescent(step_size / horizon))


def stages(context: MethodContext) -> Stages:
    """Train a reference model, where none is given."""
    options = context.options_as(DynamicLoadingOptions)
    if options.reference is not None:
        return {}
    reference = yield from proxies.train_reference(context)
    return {"options": {**options.model_dump(), "reference": reference}}


def extra(context: MethodContext) -> Extra:
    """Return the cost of the reference model and of its forward passes."""
    before = context.options_as(DynamicLoadingOptions).reference_cost(context)
    return Extra(before=before, per_step=proxies.REFERENCE_COST)


DYNAMIC_LOADING = base.register(
    base.Method(
        name="dynamic-loading",
        line="weight follows how far a domain's loss is above a reference model's, on average over a round",
        paper="Xia, Gao, Zeng, Chen 2023 (Sheared LLaMA), arXiv:2310.06694",
        needs=base.Needs(reference=True),
        memory="the reference model",
        recipe=recipe,
        options=DynamicLoadingOptions,
        horizon=base.parts_of_run(100),
        stages=stages,
        extra=extra,
    )
)
