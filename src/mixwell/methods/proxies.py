"""Runs that methods train first: a proxy that learns the weights, a reference model, proxies on many mixtures."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from mixwell.methods.base import Extra, MethodContext, Options, Outcome, Stages, Steps, Trial
from mixwell.utils.costs import FORWARD


def fixed_weights(weights: Mapping[str, float] | str) -> Mapping[str, Any]:
    """Return settings of the mixer that keep these weights."""
    kept = weights if isinstance(weights, str) else dict(weights)
    return {"method": "fixed", "weights": kept, "options": {}}


class ProxyOptions(Options):
    """Settings of methods that learn the weights in a proxy; their average then trains the model."""

    transfer: bool = True
    """Train a proxy, and then the model with the average of its weights. If false, the weights are learned while
    the model itself trains."""
    proxy_steps: Steps = "auto"
    """Training steps of the proxy; `auto` is those of the run."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of `model` that differ in models that are trained first, to make them smaller."""

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        return super().without_effect() | ({"proxy_steps", "proxy_model"} if not self.transfer else set())

    @property
    @override
    def of_earlier_runs(self) -> frozenset[str]:
        return super().of_earlier_runs | {"proxy_steps", "proxy_model"}

    @property
    @override
    def learns_in_run(self) -> bool:
        return not self.transfer


def train_proxy(context: MethodContext, method: str, **found: Any) -> Stages:
    """Train a proxy with an online method, and return settings that keep the average of its weights.

    Without ``transfer`` the last run itself learns the weights, with the options that were found.

    Args:
        found: options that were found by earlier trials, such as the reference model.
    """
    options = context.options_as(ProxyOptions)
    given = options.model_dump()
    online = {"method": method, "options": given | found | {"transfer": False, "proxy_model": {}}}
    if not options.transfer:
        return {} if given | found == given else online
    steps = context.trial_steps(options.proxy_steps)
    [proxy] = yield [Trial("proxy", online, steps=steps, model=options.proxy_model)]
    return fixed_weights(proxy.average)


class ReferenceOptions(Options):
    """Settings of methods that compare with a reference model."""

    reference: str | None = None
    """The directory of a run whose last checkpoint is the reference model; by default one is trained first, with
    `mixer.weights` kept."""
    reference_steps: Steps = "auto"
    """Its training steps; `auto` is those of the run."""

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        return super().without_effect() | ({"reference_steps"} if self.reference is not None else set())

    @property
    @override
    def of_earlier_runs(self) -> frozenset[str]:
        return super().of_earlier_runs | {"reference", "reference_steps"}

    def reference_cost(self, context: MethodContext) -> float:
        """Return the cost of the reference model's training, in training steps."""
        return 0.0 if self.reference is not None else float(context.trial_steps(self.reference_steps))


REFERENCE_COST = FORWARD
"""The cost of a reference model in every step that compares with it."""


def train_reference(
    context: MethodContext, *, model: Mapping[str, Any] | None = None
) -> Generator[Sequence[Trial], Sequence[Outcome], str]:
    """Return the name of the given reference model, or of one that is trained with the weights kept."""
    options = context.options_as(ReferenceOptions)
    if options.reference is not None:
        return options.reference
    steps = context.trial_steps(options.reference_steps)
    [trained] = yield [Trial("reference", fixed_weights(context.weights), steps=steps, model=model or {})]
    return trained.reference


class MixtureSearchOptions(Options):
    """Settings of methods that train proxies on many mixtures."""

    proxies: Annotated[int, Field(ge=4, strict=True)] = 32
    """The number of mixtures that are tried, each in its own run."""
    proxy_steps: Steps = "auto"
    """Training steps of a proxy; `auto` divides the steps of one run among all of them."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model that differ in proxies, to make them smaller: `{layers: 2, width: 64}`."""
    repeats: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 15.0
    """The largest weight of a domain in a proxy, in multiples of its share of all rows."""
    least: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """A smaller weight of a mixture becomes zero, and its domain is left out of that proxy."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        return frozenset()

    def steps(self, context: MethodContext) -> int:
        """Return the training steps of a proxy; with ``auto`` those of all proxies sum to about the run's."""
        return max(1, context.steps // self.proxies) if self.proxy_steps == "auto" else self.proxy_steps


def search_extra(context: MethodContext) -> Extra:
    """Return the cost of the proxies, as if they were no smaller than the model, and of their evaluations."""
    options = context.options_as(MixtureSearchOptions)
    evaluation = FORWARD * (context.evaluated or 0) / context.batch_rows
    return Extra(before=options.proxies * (options.steps(context) + evaluation))
