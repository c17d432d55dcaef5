"""Runs that methods train first: a proxy that learns the weights, and a reference model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from pydantic import Field

from mixwell.methods.base import MethodContext, Options, Outcome, Stages, Steps, Trial
from mixwell.utils.costs import FORWARD


def fixed_weights(weights: Mapping[str, float] | str) -> Mapping[str, Any]:
    """Return settings of the mixer that keep these weights."""
    kept = weights if isinstance(weights, str) else dict(weights)
    return {"method": "fixed", "weights": kept, "options": {}}


class ProxyOptions(Options):
    """Settings of methods that learn the weights in a proxy, whose average then trains the model."""

    transfer: bool = True
    """Train a proxy, and then the model with the average of its weights. If false, the weights are learned while
    the model itself trains."""
    proxy_steps: Steps = "auto"
    """Training steps of the proxy; `auto` is as many as the run has."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of `model` that differ in models that are trained first: a smaller size."""

    @property
    def learns_in_run(self) -> bool:
        """Not where a proxy does."""
        return not self.transfer

    def in_run(self, method: str, **changes: Any) -> Mapping[str, Any]:
        """Return settings of the mixer for a run that learns the weights itself."""
        return {
            "method": method,
            "options": self.model_dump() | changes | {"transfer": False, "proxy_model": {}},
        }


def train_proxy(context: MethodContext, online: Mapping[str, Any]) -> Stages:
    """Train a proxy with these settings of the mixer, and return the average of its weights, kept."""
    options = context.options_as(ProxyOptions)
    steps = context.trial_steps(options.proxy_steps)
    [proxy] = yield [Trial("proxy", online, steps=steps, model=options.proxy_model)]
    return fixed_weights(proxy.average)


class ReferenceOptions(Options):
    """Settings of methods that compare with a reference model."""

    reference: str | None = None
    """The directory of a run whose last checkpoint is the reference model; by default one is trained first, with
    `mixer.weights` kept."""
    reference_steps: Steps = "auto"
    """Training steps of that; `auto` is as many as the run has."""

    def reference_cost(self, context: MethodContext) -> float:
        """Return the cost of the reference model's training, in training steps."""
        return 0.0 if self.reference is not None else float(context.trial_steps(self.reference_steps))


REFERENCE_COST = FORWARD
"""The cost of a reference model in every step that compares with it."""


def train_reference(
    context: MethodContext, *, model: Mapping[str, Any] | None = None
) -> Generator[Sequence[Trial], Sequence[Outcome], str]:
    """Return the directory of the given reference model, or of one that is trained with the weights kept."""
    options = context.options_as(ReferenceOptions)
    if options.reference is not None:
        return options.reference
    steps = context.trial_steps(options.reference_steps)
    [trained] = yield [Trial("reference", fixed_weights(context.weights), steps=steps, model=model or {})]
    return str(trained.folder)
