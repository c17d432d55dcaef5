"""ADO: domains whose loss falls fastest, by scaling laws that are fitted on the way, get more weight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mixwell.methods.base import Method, NotNegative, Options, Recipe, Share, Steps, Task, every_step

INTERVALS = 60
"""The authors' 60,000 steps over the 1000 that they ignore, and after which they fit again."""


class AdoOptions(Options):
    """Of ADO."""

    prior: Literal["rows", "weights"] = "rows"
    """By which slopes are multiplied, and with which the run begins: `rows`, the domains' sizes, whatever
    `mixer.weights` says, or `weights`, those of `mixer.weights`."""
    samples: Literal["all", "domain"] = "all"
    """What a law's n counts: `all` samples of the run, or those of the `domain`."""
    credit: Literal["share", "spread"] = "share"
    """Of a domain's recent share h: `share`, `h^s` as in the paper; `spread`, `(h (1 - h))^s` as in its code."""
    credit_power: NotNegative = 0.5
    """s."""
    credit_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How fast h follows the weights, in a step."""
    preference_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The share of what the slopes say now in the new weights; the rest is what they said on average."""
    floor: Share = 0.01
    """The least that the slopes may say."""
    ignore: Annotated[int, Field(ge=0, strict=True)] | Literal["auto"] = "auto"
    """First steps after `mixer.warmup` whose losses are not fitted; `auto` is a sixtieth of all."""
    refit_every: Steps = "auto"
    """Steps after which the laws are fitted again, at the end of a round; `auto` is a sixtieth of all."""


def recipe(task: Task) -> Recipe:
    """Weights by the slopes of the domains' scaling laws.

    Args:
        task: with :class:`AdoOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.scaling_law import ScalingLaws
    from mixwell.simplex.updates import SoftmaxWeights

    options: AdoOptions = task.options
    sixtieth = -(-task.steps // INTERVALS)
    prior = {name: float(task.rows[name]) for name in task.domains} if options.prior == "rows" else None
    signal = ScalingLaws(
        prior,
        samples=options.samples,
        credit=options.credit,
        credit_power=options.credit_power,
        credit_rate=options.credit_rate,
        preference_share=options.preference_share,
        floor=options.floor,
        ignore=sixtieth if options.ignore == "auto" else options.ignore,
        refit_every=sixtieth if options.refit_every == "auto" else options.refit_every,
        warmup=task.mixer.warmup,
    )
    return Recipe(signal, SoftmaxWeights(), weights=prior)


METHODS = (
    Method(
        name="ado",
        kind="online",
        line="weight follows how fast a domain's loss falls, by scaling laws fitted while the model trains",
        paper="Jiang, Zhou, Feng, Malladi, Kolter 2024, arXiv:2410.11820",
        memory="about a thousand numbers per domain: losses in bins",
        recipe=recipe,
        options=AdoOptions,
        horizon=every_step,
    ),
)
