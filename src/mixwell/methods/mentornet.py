"""MentorNet: a curriculum says which rows are trained on, given beforehand or learned on the way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Positive,
    Recipe,
    Share,
    Task,
    Whole,
    batch_of_each,
)
from mixwell.methods.learning_to_reweight import row_recipe


class CurriculumOptions(Options):
    """Of both kinds of MentorNet."""

    level: Literal["rows", "domains"] = "rows"
    """`rows` weighs every row of a step (the paper); `domains` weighs each domain by its first weight times the
    mean of what its rows would count."""
    percentile: Share = 0.7
    """Of a batch's losses, with whose moving average a row's loss is compared."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of that moving average."""
    burn_in: Share = 0.2
    """The first share of the run, in which every row has weight one."""
    normalize: bool = False
    """Divide the weights of a batch by their mean, so that a step is as long as without them."""


class GivenOptions(CurriculumOptions):
    """Of MentorNet with a predefined curriculum."""

    curriculum: Literal["self-paced", "linear"] = "self-paced"
    """`self-paced` keeps rows whose loss is at most lambda; `linear` weighs them by `1 - loss / lambda`."""


class LearnedOptions(CurriculumOptions):
    """Of MentorNet with a data-driven curriculum."""

    hidden: Whole = 20
    """Width of the network's hidden layer."""
    learning_rate: Positive = 1e-3
    """Of the network's Adam."""
    network_steps: Whole = 50
    """That Adam takes at the end of a round."""


def given(task: Task) -> Recipe:
    """Rows, or domains, weighted by a curriculum in closed form.

    Args:
        task: with :class:`GivenOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.row_curriculum import GivenRowCurriculum

    options: GivenOptions = task.options
    return row_recipe(GivenRowCurriculum(**options.model_dump(), steps=_steps(task)), options.level)


def learned(task: Task) -> Recipe:
    """Rows, or domains, weighted by a network that learns which rows help the validation set.

    Args:
        task: with :class:`LearnedOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.learned_curriculum import LearnedRowCurriculum

    options: LearnedOptions = task.options
    signal = LearnedRowCurriculum(**options.model_dump(), steps=_steps(task), seed=task.seed)
    return row_recipe(signal, options.level)


def learned_extra(task: Task) -> Extra:
    """In every round a pass in forward mode over fresh rows, which takes as much as a gradient.

    Args:
        task: of a run.

    Returns:
        A gradient.
    """
    return Extra(per_round=batch_of_each(task))


def _steps(task: Task) -> int:
    """Those of all rounds."""
    return task.steps - task.mixer.warmup


PAPER = "Jiang, Zhou, Leung, Li, Fei-Fei 2018, arXiv:1712.05055"

METHODS = (
    Method(
        name="mentornet",
        kind="online",
        line="a given curriculum: rows with losses below a moving percentile, after a burn-in",
        paper=PAPER,
        needs=Needs(row_losses=True, domains=1),
        recipe=given,
        options=GivenOptions,
    ),
    Method(
        name="mentornet-dd",
        kind="online",
        line="a learned curriculum: a network learns from a row's loss whether it helps the validation set",
        paper=PAPER,
        needs=Needs(validation=True, row_losses=True, domains=1),
        memory="a network of a few hundred numbers",
        recipe=learned,
        options=LearnedOptions,
        extra=learned_extra,
    ),
)
