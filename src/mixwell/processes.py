"""Training in several processes (``torch.distributed``), as far as the mixer must know of it."""

from __future__ import annotations

import torch
from torch import Tensor


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
