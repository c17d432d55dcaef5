"""TANDEM: domains with losses that fall where a twin also learns from the validation set get more weight."""

from __future__ import annotations

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.utils.costs import FORWARD


class TandemOptions(base.Options):
    """Settings of TANDEM."""

    step_size: base.Positive = 5.0
    """Step size of the weights, the paper's eta_alpha: `w <- Proj(w - eta h)`; losses differ by hundredths."""
    probe_steps: base.Whole = 5
    """K, steps with a twin before each update; the other steps of a round are free."""
    gamma: base.Positive = 1.0
    """The factor of the training loss in the twin's objective."""
    learning_rate: base.Positive | None = None
    """Of the twin; by default that of the optimizer in the same step."""


def recipe(context: MethodContext) -> Recipe:
    """Return projected gradient descent on the difference of the twins' losses."""
    from mixwell.signals.twin_networks import TwinNetworks
    from mixwell.simplex.updates import ProjectedDescent

    options = context.options_as(TandemOptions)
    signal = TwinNetworks(**options.model_dump(exclude={"step_size"}))
    return Recipe(signal, ProjectedDescent(options.step_size))


def extra(context: MethodContext) -> Extra:
    """Return the cost of K steps on a validation batch and a batch of each domain, and of two losses of each."""
    options = context.options_as(TandemOptions)
    horizon = TANDEM.round_length(context.horizon, context.steps)
    each = context.domains_cost
    return Extra(
        per_round=min(options.probe_steps, horizon) * (context.validation_cost + each) + 2 * FORWARD * each
    )


TANDEM = base.register(
    base.Method(
        name="tandem",
        line="a twin that also learns from the validation set shows which domains' losses fall with the target's",
        paper="Wang, Xiang, Xu, Yi et al. 2025, arXiv:2606.04401",
        needs=base.Needs(validation=True, probes=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=recipe,
        options=TandemOptions,
        extra=extra,
    ),
)
