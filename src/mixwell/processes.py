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


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether it holds in any process; all must call it.

    Args:
        flag: of this process.
        device: on which processes exchange tensors.

    Returns:
        The same in all processes.
    """
    return flag if alone() else bool(mean(torch.tensor(float(flag), device=device)) > 0)


def gathered(own: Any) -> list[Any]:
    """What each process has, by its rank; all must call it.

    Args:
        own: of this process, can be pickled.

    Returns:
        The same in all processes.
    """
    if alone():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def rank() -> int:
    """The number of this process."""
    return 0 if alone() else torch.distributed.get_rank()


def alone() -> bool:
    """Whether there is no other process."""
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    return not running or distributed.get_world_size() == 1


def expect_alone(signal: object) -> None:
    """Refuse several processes, in each of which a signal would find other weights.

    Args:
        signal: that looks at what its own process sees.

    Raises:
        ValueError: there are others.
    """
    if not alone():
        raise ValueError(
            f"{signal!r} works in one process only, since every process would find other weights; train in one, "
            "or use Hypergradient(traces=ProjectedTraces())"
        )


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes.

    Args:
        tensor: that each process has, of the same shape in all.

    Returns:
        A new tensor, the same in all processes; the tensor itself where there is only one process.
    """
    if alone():
        return tensor
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total.div_(torch.distributed.get_world_size())
