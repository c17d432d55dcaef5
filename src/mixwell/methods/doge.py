"""DoGE: domains with gradients that align with the target's get more weight."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from mixwell.methods import base, proxies
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.simplex.rounds import round_count, validation_rows


class DogeOptions(proxies.ProxyOptions):
    """Settings of DoGE."""

    mu: base.Positive = 0.01
    """Strength of the pull to the old weights: `log w_j += W_j / mu`."""
    smoothing: base.Share = 0.0
    """The share eps of uniform weights that is mixed in."""
    clip_norm: base.Positive = 5.0
    """The norm to which every domain's gradient, and the target's, is clipped before they are compared."""
    score_cap: base.Positive = 5.0
    """The largest W_j, in learning rates."""
    target: Literal["validation", "domains"] = "validation"
    """`validation`, or `domains`: the sum of all domains' gradients (universal generalization)."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights", "validation_rows"} if self.uses_validation else {"weights"})

    @property
    @override
    def uses_validation(self) -> bool:
        return self.target == "validation"


def recipe(context: MethodContext) -> Recipe:
    """Return DoGE's rule in one run; the average of its weights is for a base model."""
    from mixwell.signals.alignment import Alignment
    from mixwell.simplex.updates import MirrorDescent, UniformSmoothing

    options = context.options_as(DogeOptions)
    signal = Alignment(options.clip_norm, universal=options.target == "domains", score_cap=options.score_cap)
    return Recipe(signal, UniformSmoothing(MirrorDescent(1 / options.mu), options.smoothing))


def extra(context: MethodContext) -> Extra:
    """Return the cost of the proxy's steps and validation gradients; a smaller proxy costs less."""
    options = context.options_as(DogeOptions)
    if not options.transfer:
        return Extra()
    steps = context.trial_steps(options.proxy_steps)
    if options.target == "domains":
        return Extra(before=float(steps))
    chosen = context.horizon
    horizon = DOGE.round_length(min(chosen, steps) if isinstance(chosen, int) else chosen, steps)
    rounds = round_count(steps - min(context.warmup, steps - 1), horizon)
    rows = context.validation_rows
    if rows == "auto":
        rows = validation_rows(context.batch_rows, steps=horizon, points=1)
    if context.held_out is not None:
        rows = min(rows, context.held_out)
    return Extra(before=steps + rounds * rows / context.batch_rows)


DOGE = base.register(
    base.Method(
        name="doge",
        kind="offline",
        line="a proxy's weights follow how gradients align with the target's; their average trains",
        paper="Fan, Pagliardini, Jaggi 2023, arXiv:2310.15393",
        needs=base.Needs(validation=True, proxies=True),
        memory="one gradient per domain, two where a round has several steps",
        recipe=recipe,
        options=DogeOptions,
        horizon=base.every_step,
        stages=lambda context: proxies.train_proxy(context, "doge"),
        extra=extra,
    )
)
