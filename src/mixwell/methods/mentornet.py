"""MentorNet: a curriculum selects the rows, given beforehand or learned while the model trains."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.methods.learning_to_reweight import RowOptions, row_recipe


class CurriculumOptions(RowOptions):
    """Settings of both kinds of MentorNet."""

    percentile: base.Share = 0.7
    """Percentile of a batch's losses; a row's loss is compared with its moving average."""
    decay: base.BelowOne = 0.9
    """Decay of that moving average."""
    burn_in: base.Share = 0.2
    """The first fraction of the run, in which every row has weight one."""
    normalize: bool = False
    """Divide the weights of a batch by their mean, so that a step is as long as without them."""


class GivenOptions(CurriculumOptions):
    """Settings of MentorNet with a predefined curriculum."""

    curriculum: Literal["self-paced", "linear"] = "self-paced"
    """`self-paced` keeps rows whose loss is at most lambda; `linear` weights them by `1 - loss / lambda`."""


class LearnedOptions(CurriculumOptions):
    """Settings of MentorNet with a data-driven curriculum."""

    hidden: base.Whole = 20
    """Width of the network's hidden layer."""
    learning_rate: base.Positive = 1e-3
    """Of the network's Adam."""
    network_steps: base.Whole = 50
    """Steps of Adam at the end of a round."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights", "validation_rows"})


def given(context: MethodContext) -> Recipe:
    """Return rows, or domains, weighted by a curriculum in closed form."""
    from mixwell.signals.row_curriculum import GivenRowCurriculum

    options = context.options_as(GivenOptions)
    return row_recipe(GivenRowCurriculum(**options.model_dump(), steps=_steps(context)))


def learned(context: MethodContext) -> Recipe:
    """Return rows, or domains, weighted by a network that learns which rows help the validation set."""
    from mixwell.signals.row_curriculum import LearnedRowCurriculum

    options = context.options_as(LearnedOptions)
    signal = LearnedRowCurriculum(**options.model_dump(), steps=_steps(context), seed=context.seed)
    return row_recipe(signal)


def learned_extra(context: MethodContext) -> Extra:
    """Return the cost of a forward-mode pass over fresh rows in every round, that of a gradient."""
    return Extra(per_round=context.domains_cost)


def _steps(context: MethodContext) -> int:
    return context.steps - context.warmup


PAPER = "Jiang, Zhou, Leung, Li, Fei-Fei 2018, arXiv:1712.05055"

base.register(
    base.Method(
        name="mentornet",
        line="a given curriculum: rows with losses below a moving percentile, after a burn-in",
        paper=PAPER,
        needs=base.Needs(row_losses=True, domains=1),
        recipe=given,
        options=GivenOptions,
    ),
    base.Method(
        name="mentornet-dd",
        line="a learned curriculum: a network learns from a row's loss whether it helps the validation set",
        paper=PAPER,
        needs=base.Needs(validation=True, probes=True, row_losses=True, domains=1),
        memory="a network of a few hundred numbers",
        recipe=learned,
        options=LearnedOptions,
        extra=learned_extra,
    ),
)
