"""PiKE: domains whose gradients are large and not noisy get more weight; there is no target."""

from __future__ import annotations

from typing import Literal

from mixwell.methods.base import Method, NotNegative, Options, Positive, Recipe, Task

PAPER = "Li, Deng, Zhong, Razaviyayn, Mirrokni 2025, arXiv:2502.06244"


class PikeOptions(Options):
    """Of PiKE."""

    zeta1: NotNegative = 0.05
    """How much the squared norm of a domain's gradient counts."""
    zeta2: NotNegative = 0.05
    """How much the noise of its rows' gradients counts against it."""
    unbiased: bool = True
    """Whether the noise of a batch is taken out of the squared norm of its gradient."""
    form: Literal["exponential", "conceptual"] = "exponential"
    """`exponential` moves the weights by both; `conceptual` sets them where the bound behind it is least."""
    smoothness: Positive = 1.0
    """L of the bound (`conceptual`)."""
    beta: Positive = 1.0
    """How far the domains' gradients help each other (`conceptual`); 1 where they are orthogonal."""
    gamma: Positive = 1.0
    """How far they add up (`conceptual`); 1 where they are orthogonal, the number of domains where equal."""
    eta: Positive | Literal["auto"] = "auto"
    """The learning rate of the bound (`conceptual`); `auto` is the optimizer's at the end of a round."""


class BalancedPikeOptions(PikeOptions):
    """Of balanced PiKE."""

    tau: Positive = 1.0
    """The loss of domain k counts `tau softmax_k(tau L)` times in training; the authors try 1, 3 and 5."""


def recipe(task: Task) -> Recipe:
    """Sizes and noises of gradients, and what they say of the weights.

    Args:
        task: with :class:`PikeOptions` or :class:`BalancedPikeOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.gradient_moments import DescentBound, GradientMoments
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    options: PikeOptions = task.options
    bound = None
    if options.form == "conceptual":
        rate = None if options.eta == "auto" else options.eta
        bound = DescentBound(options.smoothness, options.beta, options.gamma, rate)
    signal = GradientMoments(
        options.zeta1,
        options.zeta2,
        batch_rows=task.batch_rows,
        tau=options.tau if isinstance(options, BalancedPikeOptions) else None,
        unbiased=options.unbiased,
        bound=bound,
    )
    return Recipe(signal, MirrorDescent(1.0) if bound is None else SoftmaxWeights())


def hundredth(steps: int) -> int:
    """A hundred updates in a run.

    Args:
        steps: N.

    Returns:
        T.
    """
    return -(-steps // 100)


METHODS = (
    Method(
        name="pike",
        kind="online",
        line="weight follows how large a domain's gradient is, less how noisy; needs no target",
        paper=PAPER,
        memory="one gradient per domain",
        recipe=recipe,
        options=PikeOptions,
        horizon=hundredth,
    ),
    Method(
        name="pike-balanced",
        kind="online",
        line="PiKE, with the losses of domains that are behind multiplied",
        paper=PAPER,
        memory="one gradient per domain",
        recipe=recipe,
        options=BalancedPikeOptions,
        horizon=hundredth,
    ),
)
