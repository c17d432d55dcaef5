"""Skill-It and Aioli: short probes measure how much training on one domain helps the target."""

from __future__ import annotations

import math
from typing import Literal

from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import Extra, MethodContext, Recipe
from mixwell.utils.costs import FORWARD


class AffinityOptions(base.Options):
    """Settings of both methods."""

    eta: base.Positive = 0.2
    """Strength: Skill-It sets `w_i ~ exp(eta sum_j A_ij L_j)`, Aioli `w_i ~ w_i exp(eta sum_j A_ij)` with A
    normalized to a sum of one."""
    targets: Literal["validation", "domains"] = "validation"
    """The target losses: the `validation` set's (one column of A), or those of all `domains`."""
    learning_rate: base.Positive | None = None
    """Of the copy that is trained to measure A; by default that of the optimizer."""

    @property
    @override
    def uses_validation(self) -> bool:
        return self.targets == "validation"

    def targets_cost(self, context: MethodContext) -> float:
        """Return the cost of the target losses."""
        return FORWARD * (context.validation_cost if self.uses_validation else context.domains_cost)


class SkillItOptions(AffinityOptions):
    """Settings of Skill-It."""

    window: base.Whole = 3
    """Rounds whose losses L_j are summed."""
    affinity: list[list[float]] | None = None
    """A, a row for each domain: the effect of training on it on each target. By default it is measured once, at
    the end of the first round."""
    probe_steps: base.Whole = 50
    """Steps of a copy of the model on each domain, to measure A."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights"} if self.affinity is None else ())

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        return frozenset({"learning_rate", "probe_steps"} if self.affinity is not None else ())


class AioliOptions(AffinityOptions):
    """Settings of Aioli."""

    memory: base.BelowOne | None = None
    """With a number, A is a running mean with this decay, and `w_i ~ exp(eta sum_j A_ij)` (the ema of the authors'
    code)."""
    probe_steps: base.Whole = 4
    """Steps of a copy of the model on each mixture."""
    sweeps: base.Whole = 1
    """How often each mixture is trained on."""
    smoothing: base.BelowOne = 0.75
    """The share eps of uniform weights in the mixtures `(1 - eps) e_i + eps / m`."""
    chained: bool = True
    """Whether the copy continues from one mixture to the next, or starts at the model again."""


def skill_it(context: MethodContext) -> Recipe:
    """Return weights by the affinity with targets of high loss; a given affinity sets the first weights, too."""
    from mixwell.signals.affinity import SkillAffinity
    from mixwell.simplex.updates import SoftmaxWeights
    from mixwell.simplex.weights import TINY

    options = context.options_as(SkillItOptions)
    signal = SkillAffinity(**options.model_dump(), seed=context.seed)
    weights = None
    if options.affinity is not None and len(options.affinity) == len(context.domains):
        sums = [sum(row) for row in options.affinity]
        weights = {
            name: max(math.exp(options.eta * (one - max(sums))), TINY)
            for name, one in zip(context.domains, sums, strict=True)
        }
    return Recipe(signal, SoftmaxWeights(), weights=weights)


def aioli(context: MethodContext) -> Recipe:
    """Return mirror ascent along the affinity of every round."""
    from mixwell.signals.affinity import OnlineAffinity
    from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

    options = context.options_as(AioliOptions)
    if options.memory is not None:
        return Recipe(OnlineAffinity(**options.model_dump(), seed=context.seed), SoftmaxWeights())
    signal = OnlineAffinity(**options.model_dump(exclude={"eta"}), seed=context.seed)  # eta is the step size
    return Recipe(signal, MirrorDescent(options.eta))


def skill_it_extra(context: MethodContext) -> Extra:
    """Return the cost of the probes once, counted as before the run, and of the target losses in every round."""
    options = context.options_as(SkillItOptions)
    losses = options.targets_cost(context)
    probes = options.probe_steps * context.domains_cost + len(context.domains) * losses
    return Extra(before=0.0 if options.affinity is not None else probes, per_round=losses)


def aioli_extra(context: MethodContext) -> Extra:
    """Return the cost of the probes in every round, and of the target losses before and after each."""
    options = context.options_as(AioliOptions)
    m = len(context.domains)
    # Without smoothing a step on a mixture is one on its one domain.
    steps = options.sweeps * options.probe_steps * context.domains_cost * (m if options.smoothing else 1)
    return Extra(per_round=steps + (1 + m * options.sweeps) * options.targets_cost(context))


base.register(
    base.Method(
        name="skill-it",
        line="domains that were measured, once, to help the targets whose losses are high",
        paper="Chen, Roberts, Bhatia, Wang, Zhang, Sala, Re 2023, arXiv:2307.14430",
        needs=base.Needs(validation=True, probes=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=skill_it,
        options=SkillItOptions,
        horizon=base.parts_of_run(10),
        extra=skill_it_extra,
    ),
    base.Method(
        name="aioli",
        line="domains on which short probes, in every round, lower the target's loss most",
        paper="Chen, Hu, Lourie, Cho, Re 2024, arXiv:2411.05735",
        needs=base.Needs(validation=True, probes=True),
        memory="a copy of the model and of its optimizer's state",
        recipe=aioli,
        options=AioliOptions,
        horizon=base.parts_of_run(20),
        extra=aioli_extra,
    ),
)
