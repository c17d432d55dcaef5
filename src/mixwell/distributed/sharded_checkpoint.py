"""Tensors of all ranks in one folder, through ``torch.distributed.checkpoint``, readable with any world size.

The files are safetensors, so reading them runs no code. A sharded tensor is written in shards, and read in the
shards of the reader. A tensor that is equal on all ranks is written once. One that differs, such as a trace of a
rank's own gradients, is written by each rank under its name and rank; another world size takes the mean, since
traces are linear in their rows.
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

_BY_RANK = re.compile(r"(.*)@(\d+)")


def save_sharded(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of all ranks; every rank must call it.

    Args:
        folder: on a file system that all ranks see; made if it is missing.
        tensors: of this rank, by name; the same names on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer, _ = _storage()
    sharded = {name: t for name, t in tensors.items() if distributed.is_sharded(t)}
    own = {name: t.detach() for name, t in tensors.items() if name not in sharded}
    replicated = _replicated(own)
    named = {name if name in replicated else f"{name}@{distributed.rank()}": t for name, t in own.items()}
    content: dict[str, Any] = sharded | named
    try:
        with _without_warning():
            save(
                content,
                storage_writer=writer(str(folder), save_distributed=True),
                no_dist=distributed.is_single_process(),
            )
    except CheckpointException as error:  # a BaseException
        reason = _first_failure(error)
        raise OSError(reason.errno if isinstance(reason, OSError) else None, str(reason)) from error


def load_sharded(
    folder: Path, like: Mapping[str, Tensor], *, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Read tensors that were written with any world size; every rank must call it.

    Args:
        folder: filled by :func:`save_sharded`, or with other safetensors files.
        like: tensors by name, as which the result is sharded; the others are read in full.
        only: the names to read; ``None`` for all.

    Returns:
        Tensors by name, on the CPU where they are not sharded.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    _, reader = _storage()
    try:
        known: dict[str, Any] = reader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(f"{folder} holds no tensors of a distributed run ({error})") from error
    ranks: dict[str, list[int]] = {}
    for key in known:
        found = _BY_RANK.fullmatch(key)
        name, rank = (found[1], int(found[2])) if found else (key, -1)
        if only is None or name in only:
            ranks.setdefault(name, []).append(rank)

    def fetched(keys: Mapping[str, str]) -> dict[str, Tensor]:
        """Return by name the tensors under the given keys."""
        into: dict[str, Any] = {}
        for name, key in keys.items():
            pattern = like.get(name)
            if pattern is not None and distributed.is_sharded(pattern):
                into[key] = torch.zeros_like(pattern, requires_grad=False)
            else:
                into[key] = torch.zeros(known[key].size, dtype=known[key].properties.dtype)
        try:
            with _without_warning():
                load(into, storage_reader=reader(str(folder)), no_dist=distributed.is_single_process())
        except CheckpointException as error:
            raise ValueError(f"{folder} cannot be read ({_first_failure(error)})") from error
        return {name: into[key] for name, key in keys.items()}

    result = fetched({name: name for name, of in ranks.items() if of == [-1]})
    several = {name: of for name, of in ranks.items() if of != [-1]}
    # A tensor that differed by rank and is sharded here is the mean over the ranks that wrote it.
    own = {
        name
        for name, of in several.items()
        if len(of) == distributed.world_size() and not (name in like and distributed.is_sharded(like[name]))
    }
    result |= fetched({name: f"{name}@{distributed.rank()}" for name in own})
    return result | _means({name: of for name, of in several.items() if name not in own}, fetched)


def merge_rank_states(values: Sequence[Any]) -> Any:
    """Merge plain values of all ranks: equal ones as they are, the mean of numbers that differ.

    Args:
        values: one for each rank, all of the same structure.

    Example:
        >>> merge_rank_states([{"scale": 0.5, "sums": [1.0, 2.0]}, {"scale": 0.5, "sums": [3.0, 2.0]}])
        {'scale': 0.5, 'sums': [2.0, 2.0]}
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    if any(value is None for value in values):  # a rank may not have measured yet
        return merge_rank_states([value for value in values if value is not None])
    if all(isinstance(value, dict) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: merge_rank_states([value[key] for value in values if key in value]) for key in keys}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [merge_rank_states(list(each)) for each in zip(*values, strict=True)]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return sum(values) / len(values)
    raise ValueError(f"the states of the ranks do not fit together: {first!r} and others")


def _means(ranks: Mapping[str, Sequence[int]], fetched: Any) -> dict[str, Tensor]:
    """Return means over ranks, one rank after the other so that no more than two are in memory at a time."""
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


def _first_failure(error: Any) -> BaseException:
    """Return the exception of one of the ranks."""
    failures: dict[int, Any] = error.failures
    first = next(iter(failures.values()), error)
    return first[0] if isinstance(first, tuple) else first


def _replicated(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that are equal on all ranks, to the last bit."""
    own = {name: _digest(tensor) for name, tensor in tensors.items()}
    every: list[dict[str, str]] = distributed.all_gather_object(own)
    return {name for name, digest in own.items() if all(one.get(name) == digest for one in every)}


def _digest(tensor: Tensor) -> str:
    # A tensor of one number may have any stride, for which its bytes cannot be viewed.
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    content = plain.view(torch.uint8).numpy()
    found = hashlib.blake2b(str((tensor.dtype, tensor.shape)).encode(), digest_size=16)
    found.update(content.data)
    return found.hexdigest()


def _storage() -> tuple[Any, Any]:
    """Return the writer and the reader of safetensors files."""
    try:
        from torch.distributed.checkpoint.hf_storage import (
            HuggingFaceStorageReader,
            HuggingFaceStorageWriter,
        )
    except ImportError as error:
        raise ValueError(
            f"distributed checkpoints need PyTorch 2.9 or later, and this is {torch.__version__}"
        ) from error
    return HuggingFaceStorageWriter, HuggingFaceStorageReader


@contextmanager
def _without_warning() -> Generator[None]:
    """Silence the warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
