"""Skill-It and Aioli: short probes measure how much training on one domain helps the target."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Positive,
    Recipe,
    Task,
    Whole,
    batch_of_each,
    validation_batch,
)
from mixwell.utils.costs import FORWARD

Targets = Literal["validation", "domains"]


class SkillItOptions(Options):
    """Of Skill-It."""

    eta: Positive = 0.2
    """Strength: `w_i ~ exp(eta sum_j A_ij L_j)`."""
    window: Whole = 3
    """Rounds whose losses L_j are summed."""
    targets: Targets = "validation"
    """Whose losses: the `validation` set's (one column of A), or those of all `domains`."""
    affinity: list[list[float]] | None = None
    """A, a row for each domain: what training on it does for each target. By default it is measured once, at the
    end of the first round."""
    probe_steps: Whole = 50
    """Steps of a copy of the model on each domain, to measure A."""
    learning_rate: Positive | None = None
    """Of the copy; by default that of the optimizer."""

    @property
    def uses_validation(self) -> bool:
        """Not with the domains as the targets."""
        return self.targets == "validation"


class AioliOptions(Options):
    """Of Aioli."""

    eta: Positive = 0.2
    """Step size of the weights: `w_i ~ w_i exp(eta sum_j A_ij)`, with A normalized to a sum of one."""
    memory: Annotated[float, Field(ge=0, lt=1)] | None = None
    """With a number, A is a running mean of which this share stays, and `w_i ~ exp(eta sum_j A_ij)` (the ema of
    the authors' code)."""
    targets: Targets = "validation"
    """Whose losses: the `validation` set's, or those of all `domains`."""
    probe_steps: Whole = 4
    """Steps of a copy of the model on each mixture."""
    sweeps: Whole = 1
    """How often each mixture is trained on."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.75
    """The share eps of uniform weights in the mixtures `(1 - eps) e_i + eps / m`."""
    chained: bool = True
    """Whether the copy goes on from one mixture to the next, or starts at the model again."""
    learning_rate: Positive | None = None
    """Of the copy; by default that of the optimizer."""

    @property
    def uses_validation(self) -> bool:
        """Not with the domains as the targets."""
        return self.targets == "validation"


def skill_it(task: Task) -> Recipe:
    """Weights by the affinity with the targets whose losses are high.

    Args:
        task: with :class:`SkillItOptions`.

    Returns:
        The recipe; where the affinity is given, the weights begin at `exp(eta sum_j A_ij)`, as published.
    """
    from mixwell.signals.affinity import SkillAffinity
    from mixwell.simplex.updates import SoftmaxWeights
    from mixwell.simplex.weights import TINY

    options: SkillItOptions = task.options
    signal = SkillAffinity(
        eta=options.eta,
        window=options.window,
        affinity=options.affinity,
        targets=options.targets,
        probe_steps=options.probe_steps,
        learning_rate=options.learning_rate,
        seed=task.seed,
    )
    weights = None
    if options.affinity is not None and len(options.affinity) == len(task.domains):
        sums = [sum(row) for row in options.affinity]
        weights = {
            name: max(math.exp(options.eta * (one - max(sums))), TINY)
            for name, one in zip(task.domains, sums, strict=True)
        }
    return Recipe(signal, SoftmaxWeights(), weights=weights)


def aioli(task: Task) -> Recipe:
    """Mirror ascent along the affinity of every round.

    Args:
        task: with :class:`AioliOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.affinity import OnlineAffinity
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    options: AioliOptions = task.options
    signal = OnlineAffinity(
        eta=1.0 if options.memory is None else options.eta,
        memory=options.memory,
        targets=options.targets,
        probe_steps=options.probe_steps,
        sweeps=options.sweeps,
        smoothing=options.smoothing,
        chained=options.chained,
        learning_rate=options.learning_rate,
        seed=task.seed,
    )
    return Recipe(signal, MirrorDescent(options.eta) if options.memory is None else SoftmaxWeights())


def skill_it_extra(task: Task) -> Extra:
    """The probes once, which a plan counts as done before; the losses of the targets in every round.

    Args:
        task: with :class:`SkillItOptions`.

    Returns:
        What it computes.
    """
    options: SkillItOptions = task.options
    look = FORWARD * (validation_batch(task) if options.targets == "validation" else batch_of_each(task))
    probes = options.probe_steps * batch_of_each(task) + len(task.domains) * look
    return Extra(before=0.0 if options.affinity is not None else probes, per_round=look)


def aioli_extra(task: Task) -> Extra:
    """The probes in every round, and the losses of the targets before and after each.

    Args:
        task: with :class:`AioliOptions`.

    Returns:
        What it computes.
    """
    options: AioliOptions = task.options
    m, each = len(task.domains), batch_of_each(task)
    look = FORWARD * (validation_batch(task) if options.targets == "validation" else each)
    # Without smoothing a step on a mixture is one on its one domain.
    steps = options.sweeps * options.probe_steps * each * (m if options.smoothing else 1)
    return Extra(per_round=steps + (1 + m * options.sweeps) * look)


METHODS = (
    Method(
        name="skill-it",
        kind="online",
        line="domains that were measured, once, to help the targets whose losses are high",
        paper="Chen, Roberts, Bhatia, Wang, Zhang, Sala, Re 2023, arXiv:2307.14430",
        needs=Needs(validation=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=skill_it,
        options=SkillItOptions,
        horizon=lambda steps: math.ceil(steps / 10),
        extra=skill_it_extra,
    ),
    Method(
        name="aioli",
        kind="online",
        line="domains on which short probes, in every round, lower the target's loss most",
        paper="Chen, Hu, Lourie, Cho, Re 2024, arXiv:2411.05735",
        needs=Needs(validation=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=aioli,
        options=AioliOptions,
        horizon=lambda steps: math.ceil(steps / 20),
        extra=aioli_extra,
    ),
)
