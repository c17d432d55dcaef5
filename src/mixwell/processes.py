"""Training in several processes (``torch.distributed``), as far as the mixer must know of it.

Two ways of data parallelism are known. With ``DistributedDataParallel`` every process has all parameters, and a
gradient is that of its own rows until the processes' are averaged. With FSDP2 (``fully_shard``) every process has
a part of each parameter, and of each averaged gradient; such a tensor is called *spread*.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mixwell.weights import Vector

Result = TypeVar("Result")
_patient: Any = None


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


def of_own_parts(part: Tensor, pattern: Tensor) -> Tensor:
    """The tensor of which each process has a part.

    Args:
        part: what this process has of it.
        pattern: a tensor of the same shape that is spread in the same way, or not at all.

    Returns:
        The part itself where the pattern is not spread.
    """
    if not is_spread(pattern):
        return part
    from torch.distributed.tensor import DTensor

    to: Any = pattern
    return DTensor.from_local(
        part, to.device_mesh, to.placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )


def spread_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, spread over processes as another one is; all must call it.

    Args:
        tensor: the same in all processes.
        pattern: of the same shape, spread or not.

    Returns:
        The tensor itself where the pattern is not spread, or it is spread already.
    """
    if not is_spread(pattern) or is_spread(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    to: Any = pattern
    return distribute_tensor(tensor, to.device_mesh, to.placements)


def share_of_products(tensor: Tensor) -> float:
    """By what a product of own parts is multiplied, so that the sum over the processes is the product.

    Args:
        tensor: a parameter. One that is not spread has in each process a trace of that process's own rows, and
            the trace is their mean; of one that is spread several processes may have the same part.

    Returns:
        One over the number of processes that have the same part.
    """
    if not is_spread(tensor):
        return 1 / count()
    spread: Any = tensor
    sizes: tuple[int, ...] = spread.device_mesh.shape
    kept = [size for size, one in zip(sizes, spread.placements, strict=True) if one.is_replicate()]
    return 1 / int(np.prod(kept, dtype=np.int64))


def put_apart(model: nn.Module) -> None:
    """Let a model of ``fully_shard`` hold its own parts again, where it kept what it had gathered.

    Args:
        model: any. Its outermost layers stay whole after a forward pass without a backward pass, and are then
            other tensors than those that an optimiser trains.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast("Any", module).reshard()


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether it holds in any process; all must call it.

    Args:
        flag: of this process.
        device: on which processes exchange tensors.

    Returns:
        The same in all processes.
    """
    return flag if alone() else bool(mean(torch.tensor(float(flag), device=device)) > 0)


class ElsewhereError(OSError):
    """What the first process did for all has failed there, and is told there."""

    told_elsewhere = True


def first(action: Callable[[], Result]) -> Result:
    """Let the first process do something while the others wait; all must call it.

    Args:
        action: what to do. Its result can be pickled.

    Returns:
        What it gave, in all processes.

    Raises:
        ElsewhereError: it failed, in all processes but the first, which raises what happened.
    """
    if alone():
        return action()
    outcome: list[Any] = [None, None]
    error: BaseException | None = None
    if rank() == 0:
        try:
            outcome = [action(), None]
        except BaseException as raised:
            error, outcome = raised, [None, str(raised) or type(raised).__name__]
    torch.distributed.broadcast_object_list(outcome, 0, group=_patient)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise ElsewhereError(outcome[1])
    return outcome[0]


@contextmanager
def first_before_others() -> Generator[None]:
    """The first process does what is inside, then the others, which find what it has stored; all must call it.

    Raises:
        ElsewhereError: the first one failed, in the others.
    """
    if rank() == 0:
        failed: str | None = "it failed"
        try:
            yield
            failed = None
        finally:
            if not alone():
                torch.distributed.broadcast_object_list([failed], 0, group=_patient)
        return
    outcome: list[str | None] = [None]
    torch.distributed.broadcast_object_list(outcome, 0, group=_patient)
    if outcome[0] is not None:
        raise ElsewhereError(outcome[0])
    yield


def wait_through(group: Any) -> None:
    """Use a process group of its own, with more patience, where processes wait for what the first one does.

    Args:
        group: for objects; ``None`` for that of everything else.
    """
    global _patient
    _patient = group


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


def count() -> int:
    """The number of processes."""
    return 1 if alone() else torch.distributed.get_world_size()


def alone() -> bool:
    """Whether there is no other process."""
    distributed = torch.distributed
    running = distributed.is_available() and distributed.is_initialized()
    return not running or distributed.get_world_size() == 1


def expect_alone(what: object) -> None:
    """Refuse several processes, in each of which a signal would find other weights.

    Args:
        what: looks at what its own process sees.

    Raises:
        ValueError: there are others.
    """
    if not alone():
        raise ValueError(
            f"{what!r} works in one process only, since every process would find other weights; train in one, "
            "or use Hypergradient()"
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


def total(numbers: Vector, device: torch.device) -> Vector:
    """The sum of some numbers over all processes; all must call it.

    Args:
        numbers: of this process.
        device: on which processes exchange tensors.

    Returns:
        The same in all processes; the numbers themselves where there is only one.
    """
    if alone():
        return numbers
    found = torch.from_numpy(numbers.copy()).to(device)  # what was given stays as it is
    torch.distributed.all_reduce(found)
    return found.cpu().numpy()


def average(numbers: Vector, device: torch.device) -> Vector:
    """The mean of some numbers over all processes; all must call it.

    Args:
        numbers: of this process.
        device: on which processes exchange tensors.

    Returns:
        The same in all processes; the numbers themselves where there is only one.
    """
    return numbers if alone() else total(numbers, device) / count()


def table(numbers: Vector, device: torch.device) -> NDArray[np.float64]:
    """The numbers that each process has, one row for each; all must call it.

    Args:
        numbers: of this process, as many in all.
        device: on which processes exchange tensors.

    Returns:
        Shape ``(processes, numbers)``.
    """
    if alone():
        return numbers[None]
    own = torch.from_numpy(numbers).to(device)
    found = [torch.empty_like(own) for _ in range(count())]
    torch.distributed.all_gather(found, own)
    return torch.stack(found).cpu().numpy()


def _wrapped(model: nn.Module | None) -> list[DistributedDataParallel]:
    if model is None or alone():
        return []
    if isinstance(model, DistributedDataParallel):  # as it mostly is; a large model has many modules
        return [model]
    return [one for one in model.modules() if isinstance(one, DistributedDataParallel)]


def averages(model: nn.Module | None) -> bool:
    """Whether a model is one of ``DistributedDataParallel``, which can leave the averaging to others.

    Args:
        model: any.

    Returns:
        Whether it, or a part of it, is.

    Raises:
        ValueError: its processes are not all that there are.
    """
    for one in _wrapped(model):
        size = torch.distributed.get_world_size(one.process_group)
        if size != count():
            raise ValueError(
                f"the model is trained together by {size} of {count()} processes, and mixing "
                "is for all of them; use DistributedDataParallel over all processes"
            )
    return bool(_wrapped(model))


@contextmanager
def own_gradients(model: nn.Module | None) -> Generator[None]:
    """Gradients stay those of this process's rows inside: ``DistributedDataParallel`` averages none.

    Args:
        model: any; others than those do what they always do.
    """
    with ExitStack() as stack:
        for one in _wrapped(model):
            stack.enter_context(one.no_sync())
        yield


def share_buffers(model: nn.Module | None) -> None:
    """Give all processes the first one's buffers (running statistics), as the wrapper does where it averages.

    Args:
        model: any.
    """
    for one in _wrapped(model):
        if one.broadcast_buffers:
            ignored: set[str] = one.parameters_to_ignore
            same_tensors([buffer for name, buffer in one.module.named_buffers() if name not in ignored])


@torch.no_grad()
def same_tensors(tensors: Iterable[Tensor]) -> None:
    """Give all processes the first one's numbers; all must call it.

    Args:
        tensors: of which each process has all.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not alone():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in group])
        torch.distributed.broadcast(flat, 0)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))
