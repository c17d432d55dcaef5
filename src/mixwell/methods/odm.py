"""ODM: a bandit that draws more from the domains where the loss is high."""

from __future__ import annotations

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe


class OdmOptions(base.Options):
    """Settings of ODM. Its warmup is `mixer.warmup`."""

    decay: base.BelowOne = 0.9
    """Of the running means of `exp(loss)`."""


def recipe(context: MethodContext) -> Recipe:
    """Return weights that are the shares of the rewards, and some exploration."""
    from mixwell.signals.losses import LossRewards
    from mixwell.simplex.updates import SoftmaxWeights

    options = context.options_as(OdmOptions)
    return Recipe(LossRewards(options.decay), SoftmaxWeights())


base.register(
    base.Method(
        name="odm",
        line="a bandit whose reward is a running mean of exp(loss), with exploration that fades",
        paper="Albalak, Pan, Raffel, Wang 2023, arXiv:2312.02406",
        memory="a few numbers per domain",
        recipe=recipe,
        options=OdmOptions,
        horizon=base.every_step,
    ),
)
