"""Helpers for models wrapped in ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixwell.distributed.collectives import broadcast_tensors, is_single_process, world_size


def _wrapped(model: nn.Module | None) -> list[DistributedDataParallel]:
    if model is None or is_single_process():
        return []
    if isinstance(model, DistributedDataParallel):  # the common case; a large model has many modules
        return [model]
    return [one for one in model.modules() if isinstance(one, DistributedDataParallel)]


def is_ddp(model: nn.Module | None) -> bool:
    """Whether a model, or a part of it, is wrapped in ``DistributedDataParallel``.

    Raises:
        ValueError: its process group has not all ranks.
    """
    for one in _wrapped(model):
        size = torch.distributed.get_world_size(one.process_group)
        if size != world_size():
            raise ValueError(
                f"the process group of DistributedDataParallel has {size} of {world_size()} ranks, but "
                "mixing needs all of them; use DistributedDataParallel over the default process group"
            )
    return bool(_wrapped(model))


@contextmanager
def no_sync(model: nn.Module | None) -> Generator[None]:
    """Keep gradients local inside: ``DistributedDataParallel`` averages none. Other models are not affected."""
    with ExitStack() as stack:
        for one in _wrapped(model):
            stack.enter_context(one.no_sync())
        yield


def broadcast_buffers(model: nn.Module | None) -> None:
    """Broadcast buffers (running statistics) from rank 0, as the wrapper does when it synchronizes."""
    for one in _wrapped(model):
        if one.broadcast_buffers:
            ignored: set[str] = one.parameters_to_ignore
            broadcast_tensors([buffer for name, buffer in one.module.named_buffers() if name not in ignored])
