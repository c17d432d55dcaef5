"""TiKMiX: the mixture whose gradients have most influence on the target, at a few milestones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mixwell.methods.base import Extra, Method, Needs, Options, Positive, Recipe, Task, batch_of_each

PAPER = (
    "TiKMiX: Take Data Influence into Dynamic Mixture for Language Model Pre-training, 2025, arXiv:2508.17677"
)
MEMORY = "one gradient per domain, and one more"


class TikmixOptions(Options):
    """Of TiKMiX-D."""

    damping: Positive = 0.1
    """Added to the diagonal of the Fisher matrix, in units of its mean, before it is inverted."""


class SearchedTikmixOptions(TikmixOptions):
    """Of TiKMiX-M."""

    candidates: Annotated[int, Field(ge=4)] = 32
    """Mixtures that are measured at a milestone; each costs about a training step."""


def recipe(task: Task) -> Recipe:
    """The influence of the domains, and the mixture that follows.

    Args:
        task: with :class:`TikmixOptions` or :class:`SearchedTikmixOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.influence import Influence
    from mixwell.simplex.updates import SoftmaxWeights

    options: TikmixOptions = task.options
    return Recipe(Influence(options.damping, candidates=_candidates(task), seed=task.seed), SoftmaxWeights())


def extra(task: Task) -> Extra:
    """A fresh batch of every domain for each candidate.

    Args:
        task: with :class:`TikmixOptions` or :class:`SearchedTikmixOptions`.

    Returns:
        Nothing without candidates.
    """
    return Extra(per_round=_candidates(task) * batch_of_each(task))


def tenth(steps: int) -> int:
    """Ten milestones in a run.

    Args:
        steps: N.

    Returns:
        T.
    """
    return -(-steps // 10)


def _candidates(task: Task) -> int:
    return task.options.candidates if isinstance(task.options, SearchedTikmixOptions) else 0


METHODS = (
    Method(
        name="tikmix-d",
        kind="online",
        line="at milestones the mixture that has most influence on the target, by direct optimization",
        paper=PAPER,
        needs=Needs(validation=True, packages=("scipy",)),
        memory=MEMORY,
        recipe=recipe,
        options=TikmixOptions,
        horizon=tenth,
        extra=extra,
    ),
    Method(
        name="tikmix-m",
        kind="online",
        line="at milestones the mixture that has most influence on the target, by regression on candidates",
        paper=PAPER,
        needs=Needs(validation=True, packages=("lightgbm",)),
        memory=MEMORY,
        recipe=recipe,
        options=SearchedTikmixOptions,
        horizon=tenth,
        extra=extra,
    ),
)
