"""DoReMi: domains on which a proxy is worse than a reference model get more weight."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from mixwell.methods import base, proxies
from mixwell.methods.base import Extra, MethodContext, Recipe, Stages


class DoremiOptions(proxies.ReferenceOptions, proxies.ProxyOptions):
    """Settings of DoReMi. The learned weights begin uniform."""

    eta: base.Positive = 1.0
    """Step size of the weights: `log w_j += eta lam_j`."""
    smoothing: base.Share = 1e-3
    """The share c of uniform weights that is mixed in."""
    clip: Literal["element", "domain", "none"] = "element"
    """Where the excess loss is clipped at zero: in each `element` (token of a language model, else row), in the
    mean of a `domain`, or not."""
    absent: Literal["last", "zero"] = "last"
    """What a domain counts with in a step without it: its last excess loss, or nothing."""
    objective: Literal["losses", "excess"] = "losses"
    """What the training step minimizes: the weighted losses, or the weighted excess losses, clipped at zero."""

    @property
    @override
    def mixer_settings(self) -> frozenset[str]:
        # The reference model is trained with them.
        return frozenset({"weights"} if self.reference is None else ())

    @override
    def without_effect(self, *, step_size: bool = False) -> frozenset[str]:
        # The reference model has the settings of the proxy's.
        used = {"proxy_model"} if self.reference is None else set[str]()
        return super().without_effect() - used


def recipe(context: MethodContext) -> Recipe:
    """Return the proxy's rule, which needs a reference model and begins with uniform weights."""
    from mixwell.signals.losses import ExcessLosses
    from mixwell.simplex.updates import MirrorDescent, UniformSmoothing

    options = context.options_as(DoremiOptions)
    signal = ExcessLosses(options.clip, absent=options.absent, objective=options.objective)
    update = UniformSmoothing(MirrorDescent(options.eta), options.smoothing)
    return Recipe(signal, update, weights=dict.fromkeys(context.domains, 1.0))


def stages(context: MethodContext) -> Stages:
    """Train a reference model, then a proxy that is compared with it, and return the average of its weights."""
    model = context.options_as(DoremiOptions).proxy_model
    reference = yield from proxies.train_reference(context, model=model)
    return (yield from proxies.train_proxy(context, "doremi", reference=reference))


def extra(context: MethodContext) -> Extra:
    """Return the cost of the trials and of the reference model's forward passes; a smaller proxy costs less."""
    options = context.options_as(DoremiOptions)
    before = options.reference_cost(context)
    if not options.transfer:
        return Extra(before=before, per_step=proxies.REFERENCE_COST)
    return Extra(before=before + context.trial_steps(options.proxy_steps) * (1 + proxies.REFERENCE_COST))


base.register(
    base.Method(
        name="doremi",
        kind="offline",
        line="weight follows how much worse a proxy is than a reference model; its average trains the model",
        paper="Xie, Pham, Dong, Du, Liu, Lu, Liang, Le, Ma, Yu 2023, arXiv:2305.10429",
        needs=base.Needs(reference=True, proxies=True),
        memory="the reference model, while the proxy trains",
        recipe=recipe,
        options=DoremiOptions,
        horizon=base.every_step,
        stages=stages,
        extra=extra,
    )
)
