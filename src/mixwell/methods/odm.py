"""ODM: a bandit that draws more from the domains where the loss is high."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mixwell.methods.base import Method, Options, Recipe, Task, every_step


class OdmOptions(Options):
    """Of ODM. Its warm-up is `mixer.warmup`."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of the running means of `exp(loss)`."""


def recipe(task: Task) -> Recipe:
    """Weights that are the shares of the rewards, and some exploration.

    Args:
        task: with :class:`OdmOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.loss_rewards import LossRewards
    from mixwell.simplex.updates import SoftmaxWeights

    options: OdmOptions = task.options
    return Recipe(LossRewards(options.decay), SoftmaxWeights())


METHODS = (
    Method(
        name="odm",
        kind="online",
        line="a bandit whose reward is a running mean of exp(loss), with exploration that fades",
        paper="Albalak, Pan, Raffel, Wang 2023, arXiv:2312.02406",
        memory="a few numbers per domain",
        recipe=recipe,
        options=OdmOptions,
        horizon=every_step,
    ),
)
