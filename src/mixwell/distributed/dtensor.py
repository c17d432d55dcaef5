"""Helpers for parameters that FSDP2 (``fully_shard``) shards over ranks as ``DTensor``."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from mixwell.distributed.collectives import world_size


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; a collective where it is sharded."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, the tensor itself where it is not sharded."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def from_local(part: Tensor, pattern: Tensor) -> Tensor:
    """Return the tensor of which ``part`` is the shard on this rank.

    Args:
        pattern: of the full shape, with the placements that the result has; where it is not sharded, ``part`` is
            returned.
    """
    if not is_sharded(pattern):
        return part
    from torch.distributed.tensor import DTensor

    to: Any = pattern
    return DTensor.from_local(
        part, to.device_mesh, to.placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )


def distribute_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Shard a tensor that is the same on all ranks as another one is sharded; a collective.

    Returns:
        The tensor itself where the pattern is not sharded, or the tensor already is.
    """
    if not is_sharded(pattern) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    to: Any = pattern
    return distribute_tensor(tensor, to.device_mesh, to.placements)


def replication_weight(tensor: Tensor) -> float:
    """Return the factor for summing local inner products over ranks without counting replicas twice.

    Args:
        tensor: a parameter. One that is not sharded has on each rank a trace of that rank's own rows, and the
            trace is their mean; of one that is sharded several ranks may hold the same shard.

    Returns:
        One over the number of ranks that hold the same shard.
    """
    if not is_sharded(tensor):
        return 1 / world_size()
    sharded: Any = tensor
    sizes: tuple[int, ...] = sharded.device_mesh.shape
    kept = [size for size, one in zip(sizes, sharded.placements, strict=True) if one.is_replicate()]
    return 1 / int(np.prod(kept, dtype=np.int64))


def reshard(model: nn.Module) -> None:
    """Reshard FSDP2 modules that a forward pass without a backward pass left unsharded.

    Unsharded parameters are other tensors than those that the optimizer trains.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast("Any", module).reshard()
