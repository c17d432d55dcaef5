"""DoGE: domains whose gradients point where the target's does get more weight."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
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
from mixwell.simplex.rounds import validation_rows


class DogeOptions(Options):
    """Of DoGE."""

    mu: Positive = 0.01
    """Strength of the pull to the old weights: `log w_j += W_j / mu`."""
    smoothing: Share = 0.0
    """The share eps of uniform weights that is mixed in."""
    clip_norm: Positive = 5.0
    """To which every domain's gradient, and the target's, is shortened before they are compared."""
    score_cap: Positive = 5.0
    """What W_j may be at most, in learning rates."""
    target: Literal["validation", "domains"] = "validation"
    """`validation`, or `domains`: the sum of all domains' gradients (universal generalization)."""
    transfer: bool = True
    """Train a proxy, and then the model with the average of its weights. If false, the weights are learned
    while the model itself trains."""
    proxy_steps: Steps = "auto"
    """Training steps of the proxy; `auto` is as many as the run has."""
    proxy_model: dict[str, Any] = Field(default_factory=dict)
    """Settings of `model` that differ in the proxy: a smaller size."""

    @property
    def uses_validation(self) -> bool:
        """Not with the domains as the target."""
        return self.target == "validation"

    @property
    def learns_in_run(self) -> bool:
        """Not where a proxy does."""
        return not self.transfer


def recipe(task: Task) -> Recipe:
    """The rule of DoGE in one run; the average of its weights is what a base model would be trained with.

    Args:
        task: with :class:`DogeOptions`.

    Returns:
        The recipe.
    """
    from mixwell.signals.alignment import Alignment
    from mixwell.simplex.updates import MirrorDescent, UniformSmoothing

    options: DogeOptions = task.options
    signal = Alignment(options.clip_norm, universal=options.target == "domains", score_cap=options.score_cap)
    return Recipe(signal, UniformSmoothing(MirrorDescent(1 / options.mu), options.smoothing))


def stages(task: Task) -> Stages:
    """A proxy learns, and the average of its weights trains the model.

    Args:
        task: with :class:`DogeOptions`.

    Yields:
        The proxy, where there is one.

    Returns:
        Fixed weights for the run.
    """
    options: DogeOptions = task.options
    if not options.transfer:
        return {}
    online = {"method": "doge", "options": options.model_dump() | {"transfer": False, "proxy_model": {}}}
    [proxy] = yield [
        Trial("proxy", online, steps=steps_of(options.proxy_steps, task), model=options.proxy_model)
    ]
    return {"method": "fixed", "weights": dict(proxy.average), "options": {}}


def extra(task: Task) -> Extra:
    """The proxy's steps and validation gradients.

    Args:
        task: with :class:`DogeOptions`.

    Returns:
        In training steps of the model that is trained; a smaller proxy costs less. Nothing where the run
        learns by itself.
    """
    options: DogeOptions = task.options
    if not options.transfer:
        return Extra()
    steps = steps_of(options.proxy_steps, task)
    if options.target == "domains":
        return Extra(before=float(steps))
    chosen = task.mixer.horizon
    horizon = METHODS[0].length(min(chosen, steps) if isinstance(chosen, int) else chosen, steps)
    rounds = -(-(steps - min(task.mixer.warmup, steps - 1)) // horizon)
    rows = task.mixer.validation_rows
    if rows == "auto":
        rows = validation_rows(task.batch_rows, steps=horizon, points=1)
    if task.held_out is not None:
        rows = min(rows, task.held_out)
    return Extra(before=steps + rounds * rows / task.batch_rows)


METHODS = (
    Method(
        name="doge",
        kind="offline",
        line="a proxy's weights follow how gradients align with the target's; their average trains",
        paper="Fan, Pagliardini, Jaggi 2023, arXiv:2310.15393",
        needs=Needs(validation=True, proxies=True),
        memory="one gradient per domain, two where a round has several steps",
        recipe=recipe,
        options=DogeOptions,
        horizon=every_step,
        stages=stages,
        extra=extra,
    ),
)
