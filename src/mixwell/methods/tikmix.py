"""TiKMiX: the mixture with the most influence of its gradients on the target, at a few milestones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe

PAPER = (
    "TiKMiX: Take Data Influence into Dynamic Mixture for Language Model Pre-training, 2025, arXiv:2508.17677"
)
MEMORY = "one gradient per domain, and one more"


class TikmixOptions(base.Options):
    """Settings of TiKMiX-D."""

    damping: base.Positive = 0.1
    """Added to the diagonal of the Fisher matrix, in units of its mean, before it is inverted."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights", "validation_rows"})


class SearchedTikmixOptions(TikmixOptions):
    """Settings of TiKMiX-M."""

    candidates: Annotated[int, Field(ge=4)] = 32
    """Mixtures that are measured at a milestone; each costs about a training step."""


def recipe(context: MethodContext) -> Recipe:
    """Return the mixture that follows from the influence of the domains."""
    from mixwell.signals.influence import Influence
    from mixwell.simplex.updates import SoftmaxWeights

    options = context.options_as(TikmixOptions)
    signal = Influence(options.damping, candidates=_candidates(context), seed=context.seed)
    return Recipe(signal, SoftmaxWeights())


def extra(context: MethodContext) -> Extra:
    """Return the cost: a fresh batch of every domain for each candidate."""
    return Extra(per_round=_candidates(context) * context.domains_cost)


def _candidates(context: MethodContext) -> int:
    return context.options.candidates if isinstance(context.options, SearchedTikmixOptions) else 0


base.register(
    base.Method(
        name="tikmix-d",
        line="at milestones the mixture that has most influence on the target, by direct optimization",
        paper=PAPER,
        needs=base.Needs(validation=True, packages=("scipy",)),
        memory=MEMORY,
        recipe=recipe,
        options=TikmixOptions,
        horizon=base.parts_of_run(10),
        extra=extra,
    ),
    base.Method(
        name="tikmix-m",
        line="at milestones the mixture that has most influence on the target, by regression on candidates",
        paper=PAPER,
        needs=base.Needs(validation=True, probes=True, packages=("lightgbm",)),
        memory=MEMORY,
        recipe=recipe,
        options=SearchedTikmixOptions,
        horizon=base.parts_of_run(10),
        extra=extra,
    ),
)
