"""DoReMi: domains on which a proxy is worse than a reference model get more weight."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Outcome,
    Positive,
    Recipe,
    Share,
    Stages,
    Steps,
    Task,
    Trial,
    every_step,
    steps_of,
)
from mixwell.utils.costs import FORWARD


class DoremiOptions(Options):
    """Of DoReMi."""

    eta: Positive = 1.0
    """Step size of the weights: `log w_j += eta lam_j`."""
    smoothing: Share = 1e-3
    """The share c of uniform weights that is mixed in."""
    clip: Literal["element", "domain", "none"] = "element"
    """Where the excess loss is cut at zero: in each `element` (token of a language model, else row), in the mean
    of a `domain`, or not."""
    absent: Literal["last", "zero"] = "last"
    """What a domain counts with in a step that it is not in: its last excess loss, or nothing."""
    objective: Literal["losses", "excess"] = "losses"
    """What the training step makes less: the weighted losses, or the weighted excess losses, cut at zero."""
    reference: str | None = None
    """The directory of a run whose last checkpoint is the reference model; by default one is trained first, with
    `mixer.weights` kept. The weights that are learned begin uniform."""
    reference_steps: Steps = "auto"
    """Training steps of that; `auto` is as many as the run has."""
    proxy_steps: Steps = "auto"
    """Training steps of the proxy; `auto` is as many as the run has."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of `model` that differ in the reference and the proxy that are trained first: a smaller size."""
    transfer: bool = True
    """Train a proxy, and then the model with the average of its weights. If false, the weights are learned while
    the model itself trains."""

    @property
    def learns_in_run(self) -> bool:
        """Not where a proxy does."""
        return not self.transfer


def recipe(task: Task) -> Recipe:
    """The rule of the proxy, which needs a reference model and begins with uniform weights.

    Args:
        task: with :class:`DoremiOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.excess_losses import ExcessLosses
    from mixwell.simplex.updates import MirrorDescent, UniformSmoothing

    options: DoremiOptions = task.options
    signal = ExcessLosses(options.clip, absent=options.absent, objective=options.objective)
    update = UniformSmoothing(MirrorDescent(options.eta), options.smoothing)
    return Recipe(signal, update, weights=dict.fromkeys(task.domains, 1.0))


def stages(task: Task) -> Stages:
    """A reference model, a proxy that is compared with it, and the average of the proxy's weights, kept.

    Args:
        task: with :class:`DoremiOptions`.

    Yields:
        The trials, one at a time.

    Returns:
        Settings of the last run.
    """
    options: DoremiOptions = task.options
    reference = options.reference
    if reference is None:
        reference = yield from trained_reference(task, options.reference_steps, model=options.proxy_model)
    found = {"reference": reference, "transfer": False, "proxy_model": {}}
    online: Mapping[str, Any] = {"method": "doremi", "options": options.model_dump() | found}
    if not options.transfer:
        return {} if options.reference is not None else online
    [proxy] = yield [
        Trial("proxy", online, steps=steps_of(options.proxy_steps, task), model=options.proxy_model)
    ]
    return {"method": "fixed", "weights": dict(proxy.average), "options": {}}


def trained_reference(
    task: Task, steps: Steps, *, model: Mapping[str, Any]
) -> Generator[Sequence[Trial], Sequence[Outcome], str]:
    """A reference model, with the weights of the settings kept.

    Args:
        task: of the run.
        steps: of its training.
        model: settings of the model that differ.

    Yields:
        The one trial.

    Returns:
        Its directory.
    """
    kept = {"method": "fixed", "weights": task.mixer.weights, "options": {}}
    [trained] = yield [Trial("reference", kept, steps=steps_of(steps, task), model=model)]
    return str(trained.folder)


def extra(task: Task) -> Extra:
    """The trials, and the forward passes of the reference model where the weights are learned.

    Args:
        task: with :class:`DoremiOptions`.

    Returns:
        In training steps of the model that is trained; a smaller proxy costs less.
    """
    options: DoremiOptions = task.options
    before = 0.0 if options.reference is not None else float(steps_of(options.reference_steps, task))
    if not options.transfer:
        return Extra(before=before, per_step=FORWARD)
    return Extra(before=before + steps_of(options.proxy_steps, task) * (1 + FORWARD))


METHODS = (
    Method(
        name="doremi",
        kind="offline",
        line="weight follows how much worse a proxy is than a reference model; its average trains the model",
        paper="Xie, Pham, Dong, Du, Liu, Lu, Liang, Le, Ma, Yu 2023, arXiv:2305.10429",
        needs=Needs(reference=True, proxies=True),
        memory="the reference model, while the proxy trains",
        recipe=recipe,
        options=DoremiOptions,
        horizon=every_step,
        stages=stages,
        extra=extra,
    ),
)
