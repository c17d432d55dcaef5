"""Tensors of several processes in one folder, through ``torch.distributed.checkpoint``, for any number of them.

The files are safetensors, so that reading them runs no code. A tensor that is spread over processes is written in
its parts, and read in those of whoever reads. One that all processes have alike is written once. One that differs,
such as a trace of a process's own gradients, is written by each under its name and rank; another number of
processes takes the mean of them, since traces are linear in the rows that they are of.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixwell import distributed

_OWN = re.compile(r"(.*)@(\d+)")


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of all processes, each of which must call it.

    Args:
        folder: on a file system that all processes see; made if it is missing.
        tensors: of this process, by name; the same names in all.

    Raises:
        OSError: it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer, _ = _storage()
    spread = {name: t for name, t in tensors.items() if distributed.is_sharded(t)}
    own = {name: t.detach() for name, t in tensors.items() if name not in spread}
    alike = _alike(own)
    named = {name if name in alike else f"{name}@{distributed.rank()}": t for name, t in own.items()}
    content: dict[str, Any] = spread | named
    try:
        with _quiet():
            save(
                content,
                storage_writer=writer(str(folder), save_distributed=True),
                no_dist=distributed.is_single_process(),
            )
    except CheckpointException as error:  # which is no Exception
        reason = _reason(error)
        raise OSError(reason.errno if isinstance(reason, OSError) else None, str(reason)) from error


def read(
    folder: Path, like: Mapping[str, Tensor], *, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Read tensors that any number of processes wrote; all must call it.

    Args:
        folder: that :func:`write` filled, or with other safetensors files.
        like: tensors by name that tell how one is spread over the processes here; those that are not named are
            read whole.
        only: the names to read; ``None`` for all that are there.

    Returns:
        By name; ordinary tensors on the CPU, others as they are in ``like``.

    Raises:
        ValueError: the folder holds no such tensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    _, reader = _storage()
    try:
        known: dict[str, Any] = reader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"{folder} holds no tensors of several processes ({error})") from error
    ranks: dict[str, list[int]] = {}
    for key in known:
        found = _OWN.fullmatch(key)
        name, rank = (found[1], int(found[2])) if found else (key, -1)
        if only is None or name in only:
            ranks.setdefault(name, []).append(rank)

    def fetched(keys: Mapping[str, str]) -> dict[str, Tensor]:
        """By name what is under a key."""
        into: dict[str, Any] = {}
        for name, key in keys.items():
            pattern = like.get(name)
            if pattern is not None and distributed.is_sharded(pattern):
                into[key] = torch.zeros_like(pattern, requires_grad=False)
            else:
                into[key] = torch.zeros(known[key].size, dtype=known[key].properties.dtype)
        try:
            with _quiet():
                load(into, storage_reader=reader(str(folder)), no_dist=distributed.is_single_process())
        except CheckpointException as error:
            raise ValueError(f"{folder} cannot be read ({_reason(error)})") from error
        return {name: into[key] for name, key in keys.items()}

    result = fetched({name: name for name, of in ranks.items() if of == [-1]})
    several = {name: of for name, of in ranks.items() if of != [-1]}
    # What was a process's own and is spread here is that of all processes.
    own = {
        name
        for name, of in several.items()
        if len(of) == distributed.world_size() and not (name in like and distributed.is_sharded(like[name]))
    }
    result |= fetched({name: f"{name}@{distributed.rank()}" for name in own})
    return result | _means({name: of for name, of in several.items() if name not in own}, fetched)


def merged(values: Sequence[Any]) -> Any:
    """Plain values of several processes as one: equal ones as they are, the mean of numbers that differ.

    Args:
        values: one for each process, all of the same form.

    Returns:
        One value.

    Raises:
        ValueError: they are not of the same form.

    Example:
        >>> merged([{"scale": 0.5, "sums": [1.0, 2.0]}, {"scale": 0.5, "sums": [3.0, 2.0]}])
        {'scale': 0.5, 'sums': [2.0, 2.0]}
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    if any(value is None for value in values):  # some have not seen what others have
        return merged([value for value in values if value is not None])
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: merged([value[key] for value in values if key in value]) for key in keys}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [merged(list(each)) for each in zip(*values, strict=True)]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return sum(values) / len(values)
    raise ValueError(f"the states of the processes do not fit together: {first!r} and others")


def _means(ranks: Mapping[str, Sequence[int]], fetched: Any) -> dict[str, Tensor]:
    """The means of what processes had, one process after the other so that no more than two are held at a time."""
    totals: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for rank in sorted({rank for of in ranks.values() for rank in of}):
        found = fetched({name: f"{name}@{rank}" for name, of in ranks.items() if rank in of})
        for name, one in found.items():
            kinds.setdefault(name, one.dtype)
            if not one.is_floating_point():  # the state of a generator
                totals.setdefault(name, one)
            elif name in totals:
                totals[name].add_(one.double(), alpha=1 / len(ranks[name]))
            else:
                totals[name] = one.double() / len(ranks[name])
    return {name: total.to(kinds[name]) for name, total in totals.items()}


def _reason(error: Any) -> BaseException:
    """What happened in one of the processes."""
    failures: dict[int, Any] = error.failures
    first = next(iter(failures.values()), error)
    return first[0] if isinstance(first, tuple) else first


def _alike(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of those that are the same in all processes, to the last bit."""
    own = {name: _digest(tensor) for name, tensor in tensors.items()}
    every: list[dict[str, str]] = distributed.all_gather_object(own)
    return {name for name, digest in own.items() if all(one.get(name) == digest for one in every)}


def _digest(tensor: Tensor) -> str:
    # A tensor of one number may have any stride, in which its bytes could not be looked at.
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    content = plain.view(torch.uint8).numpy()
    found = hashlib.blake2b(str((tensor.dtype, tensor.shape)).encode(), digest_size=16)
    found.update(content.data)
    return found.hexdigest()


def _storage() -> tuple[Any, Any]:
    """The writer and the reader of safetensors files."""
    try:
        from torch.distributed.checkpoint.hf_storage import (
            HuggingFaceStorageReader,
            HuggingFaceStorageWriter,
        )
    except ImportError as error:
        raise ValueError(
            f"checkpoints of several processes need PyTorch 2.9 or later, and this is {torch.__version__}"
        ) from error
    return HuggingFaceStorageWriter, HuggingFaceStorageReader


@contextmanager
def _quiet() -> Generator[None]:
    """Without the warning that there is one process only, which we know."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
