"""Rank, world size and collectives, with single-process fallbacks.

Every collective must be called by all ranks; ``device`` is where it runs. Without a process group, or in a world
of one, each returns its argument, so callers need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixwell.typing import Vector

Result = TypeVar("Result")
F = TypeVar("F", bound=np.floating[Any])
# Rank 0 may tokenize or train proxies for hours while the others wait: that takes a group with a longer timeout.
_object_group: Any = None


def is_single_process() -> bool:
    """Whether there is no other rank."""
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    return not running or distributed.get_world_size() == 1


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return 0 if is_single_process() else torch.distributed.get_rank()


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return 1 if is_single_process() else torch.distributed.get_world_size()


def require_single_process(what: object) -> None:
    """Refuse several ranks, for a signal that sees the rows of its own rank only."""
    if not is_single_process():
        raise ValueError(
            f"{what!r} supports a single process only, because each rank would compute different weights; train "
            "in one process, or use Hypergradient()"
        )


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether ``flag`` is true on any rank."""
    if is_single_process():
        return flag
    return bool(all_reduce_mean(torch.tensor(float(flag), device=device)) > 0)


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean over ranks as a new tensor."""
    if is_single_process():
        return tensor
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total.div_(torch.distributed.get_world_size())


def all_reduce_sum(numbers: NDArray[F], device: torch.device) -> NDArray[F]:
    """Return the sum of an array over ranks."""
    if is_single_process():
        return numbers
    # A copy, because the reduction is in place.
    found = torch.from_numpy(numbers.copy()).to(device)
    torch.distributed.all_reduce(found)
    return found.cpu().numpy()


def all_gather_array(numbers: Vector, device: torch.device) -> NDArray[np.float64]:
    """Return the arrays of all ranks, shape ``(world_size, len(numbers))``.

    Args:
        numbers: of the same length on all ranks.
    """
    if is_single_process():
        return numbers[None]
    own = torch.from_numpy(numbers).to(device)
    found = [torch.empty_like(own) for _ in range(world_size())]
    torch.distributed.all_gather(found, own)
    return torch.stack(found).cpu().numpy()


def all_gather_object(own: Any) -> list[Any]:
    """Return the objects of all ranks, by rank. They are pickled."""
    if is_single_process():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, in one broadcast per dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not is_single_process():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in group])
        torch.distributed.broadcast(flat, 0)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


class RankZeroError(OSError):
    """Raised on the other ranks when :func:`run_on_rank_zero` failed; rank 0 reports the error itself."""

    already_reported = True


def run_on_rank_zero(action: Callable[[], Result]) -> Result:
    """Run a function on rank 0 while the others wait, and return its (pickled) result on all ranks.

    Raises:
        RankZeroError: on all ranks but 0, which raises the original exception.
    """
    if is_single_process():
        return action()
    outcome: list[Any] = [None, None]
    error: BaseException | None = None
    if rank() == 0:
        try:
            outcome = [action(), None]
        except BaseException as raised:
            error, outcome = raised, [None, str(raised) or type(raised).__name__]
    torch.distributed.broadcast_object_list(outcome, 0, group=_object_group)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RankZeroError(outcome[1])
    return outcome[0]


@contextmanager
def rank_zero_first() -> Generator[None]:
    """Run the body on rank 0, then on the others, which find what rank 0 has cached.

    Raises:
        RankZeroError: on the other ranks, when rank 0 failed.
    """
    if rank() == 0:
        failed: str | None = "it failed"
        try:
            yield
            failed = None
        finally:
            if not is_single_process():
                torch.distributed.broadcast_object_list([failed], 0, group=_object_group)
        return
    outcome: list[str | None] = [None]
    torch.distributed.broadcast_object_list(outcome, 0, group=_object_group)
    if outcome[0] is not None:
        raise RankZeroError(outcome[0])
    yield


def set_object_group(group: Any) -> None:
    """Set the process group on which ranks wait for rank 0, ``None`` for the default one."""
    global _object_group
    _object_group = group
