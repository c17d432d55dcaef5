"""ADO: domains with the fastest falling loss, by scaling laws fitted in training, get more weight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from mixwell.methods import base
from mixwell.methods.base import MethodContext, Recipe

INTERVALS = 60
"""The authors' 60,000 steps over the 1000 that they ignore, and after which they fit again."""


class AdoOptions(base.Options):
    """Settings of ADO."""

    prior: Literal["rows", "weights"] = "rows"
    """mu, which multiplies the slopes and is the initial mixture: `rows`, the domains' sizes, whatever
    `mixer.weights` is, or `weights`, those of `mixer.weights`."""
    samples: Literal["all", "domain"] = "all"
    """What a law's n counts: `all` samples of the run, or those of the `domain`."""
    credit: Literal["share", "spread"] = "share"
    """Function of a domain's recent share h: `share`, `h^s` (the paper); `spread`, `(h (1 - h))^s` (its code)."""
    credit_power: base.NotNegative = 0.5
    """s."""
    credit_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How fast h follows the weights: their part in h after one step."""
    preference_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The part of the current preference in the new weights; the rest is the average preference so far."""
    floor: base.Share = 0.01
    """The least preference of a domain."""
    ignore: Annotated[int, Field(ge=0, strict=True)] | Literal["auto"] = "auto"
    """First steps after `mixer.warmup` whose losses are not fitted; `auto` is a sixtieth of all."""
    refit_every: base.Steps = "auto"
    """Steps after which the laws are fitted again, at the end of a round; `auto` is a sixtieth of all."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset({"weights"} if self.prior == "weights" else ())


def recipe(context: MethodContext) -> Recipe:
    """Return weights by the slopes of the domains' scaling laws."""
    from mixwell.signals.scaling_laws import ScalingLaws
    from mixwell.simplex.updates import SoftmaxWeights

    options = context.options_as(AdoOptions)
    sixtieth = -(-context.steps // INTERVALS)
    prior = {name: float(context.rows[name]) for name in context.domains} if options.prior == "rows" else None
    settings = options.model_dump(exclude={"prior"})
    settings |= {key: sixtieth for key in ("ignore", "refit_every") if settings[key] == "auto"}
    signal = ScalingLaws(prior, **settings, warmup=context.warmup)
    return Recipe(signal, SoftmaxWeights(), weights=prior)


base.register(
    base.Method(
        name="ado",
        line="weight follows how fast a domain's loss falls, by scaling laws fitted while the model trains",
        paper="Jiang, Zhou, Feng, Malladi, Kolter 2024, arXiv:2410.11820",
        memory="about a thousand numbers per domain: losses in bins",
        recipe=recipe,
        options=AdoOptions,
        horizon=base.every_step,
    ),
)
