"""Training in several processes (``torch.distributed``), as far as the mixer must know of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes (a ``DTensor``, as FSDP has them).

    Args:
        tensor: any.

    Returns:
        Whether it is.
    """
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over processes, brought together; all processes must call it.

    Args:
        tensor: any.

    Returns:
        The tensor itself where it is an ordinary one.
    """
    spread: Any = tensor
    return spread.full_tensor() if is_spread(tensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that may be spread.

    Args:
        tensor: any.

    Returns:
        The tensor itself where it is an ordinary one.
    """
    spread: Any = tensor
    return spread.to_local() if is_spread(tensor) else tensor


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes.

    Args:
        tensor: that each process has, of the same shape in all.

    Returns:
        A new tensor, the same in all processes; the tensor itself where there is only one process.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor
    count = torch.distributed.get_world_size()
    if count == 1:
        return tensor
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total.div_(count)
