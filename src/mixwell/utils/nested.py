"""Batches as nested containers (tensors, mappings, tuples, lists) whose first dimension is the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def row_count(batch: Any) -> int:
    """Return the number of rows of a batch of columns, or of a list of rows."""
    if isinstance(batch, Mapping):
        return row_count(next(iter(cast("Mapping[Any, Any]", batch).values())))
    return row_count(batch[0]) if _has_columns(batch) else len(batch)


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return the rows of several batches of the same form, one after the other, in that form."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {
            key: concat_batches([one[key] for one in batches]) for key in cast("Mapping[Any, Any]", first)
        }
    if _has_columns(first):
        return like_container(
            first, [concat_batches([one[place] for one in batches]) for place in range(len(first))]
        )
    return [value for one in batches for value in one]


def slice_rows(batch: Any, begin: int, end: int) -> Any:
    """Return the rows ``begin`` to ``end`` of a batch, in the same form."""
    if isinstance(batch, Mapping):
        return {key: slice_rows(value, begin, end) for key, value in cast("Mapping[Any, Any]", batch).items()}
    if _has_columns(batch):
        return like_container(batch, [slice_rows(column, begin, end) for column in batch])
    return batch[begin:end]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; other values stay as they are."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, tuple | list):
        return like_container(batch, [to_device(value, device) for value in cast("Sequence[Any]", batch)])
    return batch


def like_container(batch: Any, values: Sequence[Any]) -> Any:
    """Return the values in a tuple, named tuple or list of the same type as ``batch``."""
    kind = type(batch)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _has_columns(batch: Any) -> bool:
    """Return whether a sequence holds columns, and not rows such as strings."""
    return isinstance(batch, tuple | list) and isinstance(batch[0], Tensor | Mapping | tuple | list)


def identity(batch: Any) -> Any:
    """Return the batch itself: the ``collate_fn`` of a ``DataLoader`` whose dataset makes whole batches."""
    return batch
