"""The optimizer of a run, and its state as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.training.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def build(settings: OptimizerConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer that a config names. Weight decay is for matrices only, not for norms and biases.

    Args:
        settings: its settings.
        parameters: what it trains.

    Returns:
        The optimizer.
    """
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, settings.weight_decay), (others, 0.0))
        if group
    ]
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)


def state(optimizer: Optimizer) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What the optimizer remembers of each parameter. Its settings are the config's.

    Args:
        optimizer: of the run.

    Returns:
        Plain values by the number of the parameter, and tensors under ``number.name``.
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
    """Of every moment that an optimizer may remember the parameter, whose shape it has.

    Args:
        optimizer: of the run.

    Returns:
        Parameters under the names of :func:`state`.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{index}.{name}": p for index, p in enumerate(parameters) for name in MOMENTS}


def load_state(
    optimizer: Optimizer, plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Take up what :func:`state` gave, whatever the number of processes that had it.

    Args:
        optimizer: with the same settings.
        plain: its plain values.
        tensors: its tensors.
    """
    known = patterns(optimizer)
    tensors = {
        key: distributed.distribute_like(tensor, known[key]) if key in known else tensor
        for key, tensor in tensors.items()
    }
    remembered: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in plain.items()}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        remembered.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": remembered})
