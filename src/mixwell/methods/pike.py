"""PiKE: domains with large and not noisy gradients get more weight; there is no target."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe

PAPER = "Li, Deng, Zhong, Razaviyayn, Mirrokni 2025, arXiv:2502.06244"


class PikeOptions(base.Options):
    """Settings of PiKE."""

    zeta1: base.NotNegative = 0.05
    """How much the squared norm of a domain's gradient counts."""
    zeta2: base.NotNegative = 0.05
    """How much the noise of its rows' gradients counts against it."""
    unbiased: bool = True
    """Whether the noise of a batch is taken out of the squared norm of its gradient."""
    form: Literal["exponential", "conceptual"] = "exponential"
    """`exponential` moves the weights by both; `conceptual` sets them where the bound behind it is least."""
    smoothness: base.Positive = 1.0
    """L of the bound (`conceptual`)."""
    beta: base.Positive = 1.0
    """How far the domains' gradients align (`conceptual`); 1 where they are orthogonal."""
    gamma: base.Positive = 1.0
    """How far they add up (`conceptual`); 1 where they are orthogonal, the number of domains where equal."""
    eta: base.Positive | Literal["auto"] = "auto"
    """The learning rate of the bound (`conceptual`); `auto` is the optimizer's at the end of a round."""

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        conceptual = self.form == "conceptual"
        return frozenset({"zeta1", "zeta2"} if conceptual else {"smoothness", "beta", "gamma", "eta"})


class BalancedPikeOptions(PikeOptions):
    """Settings of balanced PiKE."""

    tau: base.Positive = 1.0
    """The loss of domain k counts `tau softmax_k(tau L)` times in training; the authors try 1, 3 and 5."""


def recipe(context: MethodContext) -> Recipe:
    """Return weights by the sizes and noises of gradients."""
    from mixwell.signals.gradient_moments import DescentBound, GradientMoments
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    options = context.options_as(PikeOptions)
    bound = None
    if options.form == "conceptual":
        rate = None if options.eta == "auto" else options.eta
        bound = DescentBound(options.smoothness, options.beta, options.gamma, rate)
    signal = GradientMoments(
        options.zeta1,
        options.zeta2,
        batch_rows=context.batch_rows,
        tau=options.tau if isinstance(options, BalancedPikeOptions) else None,
        unbiased=options.unbiased,
        bound=bound,
    )
    return Recipe(signal, MirrorDescent(1.0) if bound is None else SoftmaxWeights())


base.register(
    base.Method(
        name="pike",
        line="weight follows how large a domain's gradient is, less how noisy; needs no target",
        paper=PAPER,
        memory="one gradient per domain",
        recipe=recipe,
        options=PikeOptions,
        horizon=base.parts_of_run(100),
    ),
    base.Method(
        name="pike-balanced",
        line="PiKE, with the losses of domains that are behind multiplied",
        paper=PAPER,
        memory="one gradient per domain",
        recipe=recipe,
        options=BalancedPikeOptions,
        horizon=base.parts_of_run(100),
    ),
)
