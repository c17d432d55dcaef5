"""Optimizers and learning-rate schedules of the runner, and the state of an optimizer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.utils.registry import Registry
from mixwell.utils.sections import BelowOne, ConfigSection, Count, NotNegative, Positive, Share

Decay = Callable[[float], float]
SCHEDULES = Registry[Decay]("schedule")
"""By name, a function of the fraction of steps done after the warm-up: 1 at the peak rate, 0 at the final one."""
SCHEDULES.add("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2)
SCHEDULES.add("linear", lambda done: 1 - done)
SCHEDULES.add("constant", lambda done: 1.0)


def _known_schedule(name: str) -> str:
    SCHEDULES.get(name)
    return name


class OptimizerConfig(ConfigSection):
    """The section ``optimizer`` of a config. A subclass adds the settings of a kind of optimizer."""

    moments: ClassVar[tuple[str, ...]]
    """Names of the state tensors that have the shape of their parameter."""
    preconditioned: ClassVar[bool] = False
    """Whether the step is rescaled by a second moment, so that ranks exchange its statistics."""

    kind: str
    """The kind of optimizer."""
    lr: Annotated[float, Field(gt=0, le=1e30)] = 1e-3
    """The peak learning rate."""
    weight_decay: NotNegative = 0.0
    """Applied to matrices only, not to norms and biases."""
    schedule: Annotated[str, AfterValidator(_known_schedule)] = "cosine"
    """How the learning rate falls after the warm-up: `cosine`, `linear` or `constant`."""
    warmup: Count | Literal["auto"] = "auto"
    """Steps in which it rises; `auto` is a twentieth of all, at most 1000."""
    final: Share = 0.1
    """The fraction of the learning rate that is left at the end (cosine, linear)."""
    clip_norm: Positive | None = 1.0
    """The gradient is clipped to this norm; null for never."""

    @abstractmethod
    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """Make the optimizer of parameter groups, each with its ``params`` and ``weight_decay``."""


OPTIMIZERS = Registry[type[OptimizerConfig]]("optimizer")
"""Config sections by the key ``optimizer.kind``."""


@final
@OPTIMIZERS.register("adamw")
class AdamWConfig(OptimizerConfig):
    """AdamW."""

    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    preconditioned = True

    kind: str = "adamw"
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the two moments."""

    @override
    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas)


@final
@OPTIMIZERS.register("sgd")
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    moments = ("momentum_buffer",)

    kind: str = "sgd"
    momentum: BelowOne = 0.0
    """Decay rate of the momentum."""

    @override
    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


def build_optimizer(settings: OptimizerConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """Make the optimizer of a config, with weight decay on matrices only."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return settings.build(
        [
            {"params": group, "weight_decay": decay}
            for group, decay in ((matrices, settings.weight_decay), (others, 0.0))
            if group
        ]
    )


def learning_rate(optimizer: OptimizerConfig, *, step: int, steps: int) -> float:
    """Return the learning rate of a step: a function of the step only, so that a resumed run needs no state.

    It rises linearly over ``warmup`` steps, then falls from ``lr`` to ``final * lr`` by the schedule.

    Example:
        >>> settings = AdamWConfig(lr=1.0, schedule="linear", warmup=2, final=0.0)
        >>> [learning_rate(settings, step=step, steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(steps // 20, 1000) if optimizer.warmup == "auto" else optimizer.warmup
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    left = SCHEDULES.get(optimizer.schedule)(min((step - warmup) / max(steps - warmup, 1), 1.0))
    if left == 1:  # exactly, since final + (1 - final) may be rounded
        return optimizer.lr
    return optimizer.lr * (optimizer.final + (1 - optimizer.final) * left)


def state(optimizer: Optimizer) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Return the state of each parameter: plain values by its number, and tensors under ``number.name``.

    The settings of the optimizer are left out, as they are those of the config.
    """
    plain: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                plain.setdefault(str(index), {})[name] = value
    return plain, tensors


def patterns(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return, under the names of :func:`state`, the parameter that each moment is sharded like."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {name for kind in OPTIMIZERS.names() for name in OPTIMIZERS.get(kind).moments}
    return {f"{index}.{name}": p for index, p in enumerate(parameters) for name in moments}


def load_state(
    optimizer: Optimizer, plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Load the result of :func:`state`, whatever the world size that saved it."""
    known = patterns(optimizer)
    loaded: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in plain.items()}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        value = distributed.distribute_like(tensor, known[key]) if key in known else tensor
        loaded.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})
