"""Batches as nested containers: tensors, mappings, tuples and lists that hold rows.

A tensor holds rows along its first dimension, and a mapping holds columns. A sequence is read by the number of
rows: it holds columns if each of its entries has that many rows, and rows if it has that many entries. Where both
are true, a tuple holds columns, as the tuples of ``TensorDataset`` do, and a list is refused: ``default_collate``
returns lists of columns, ``collate=list`` returns lists of rows, and nothing distinguishes them. A list within a
mapping is one column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def concat_batches(batches: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the rows of several batches of the same form, one after the other, in that form.

    Args:
        rows: the number of rows of each batch.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        keys = cast("Mapping[Any, Any]", first)
        return {key: _concat_column([one[key] for one in batches], rows) for key in keys}
    if isinstance(first, tuple | list) and _hold_columns(batches, rows):
        return like_container(
            first, [concat_batches(columns, rows) for columns in zip(*batches, strict=True)]
        )
    return [row for one in batches for row in one]


def slice_rows(batch: Any, begin: int, end: int, rows: int) -> Any:
    """Return the rows ``begin`` to ``end`` of a batch of ``rows`` rows, in the same form."""
    if isinstance(batch, Mapping):
        columns = cast("Mapping[Any, Any]", batch)
        return {
            key: column[begin:end] if _is_column(column, rows) else slice_rows(column, begin, end, rows)
            for key, column in columns.items()
        }
    if isinstance(batch, tuple | list):
        sequence = cast("Sequence[Any]", batch)
        if _hold_columns([sequence], [rows]):
            return like_container(batch, [slice_rows(column, begin, end, rows) for column in sequence])
    elif not _has_rows(batch, rows):
        raise _wrong_rows(batch, rows)
    return batch[begin:end]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; other values stay as they are."""
    return map_tensors(lambda value: value.to(device, non_blocking=True), batch)


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return nested values with each tensor replaced by the function's result; other values stay as they are."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, Mapping):
        entries = cast("Mapping[Any, Any]", values)
        return {key: map_tensors(function, value) for key, value in entries.items()}
    if isinstance(values, tuple | list):
        return like_container(
            values, [map_tensors(function, value) for value in cast("Sequence[Any]", values)]
        )
    return values


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors of nested values, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        return [one for value in cast("Mapping[Any, Any]", values).values() for one in tensors(value)]
    if isinstance(values, tuple | list):
        return [one for value in cast("Sequence[Any]", values) for one in tensors(value)]
    return []


def like_container(batch: Any, values: Sequence[Any]) -> Any:
    """Return the values in a tuple, named tuple or list of the same type as ``batch``."""
    kind = type(batch)
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def identity(batch: Any) -> Any:
    """Return the batch itself: the ``collate_fn`` of a ``DataLoader`` with a dataset of whole batches."""
    return batch


def _is_column(value: Any, rows: int) -> bool:
    """Return whether an entry of a mapping is a list with one item for each row."""
    return isinstance(value, list) and len(cast("list[Any]", value)) == rows


def _concat_column(values: list[Any], rows: Sequence[int]) -> Any:
    if all(_is_column(value, count) for value, count in zip(values, rows, strict=True)):
        return [item for value in values for item in value]
    return concat_batches(values, rows)


def _hold_columns(batches: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether sequences of the same form hold columns, and not rows; refuse what cannot be decided."""
    columns = all(_are_columns(one, count) for one, count in zip(batches, rows, strict=True))
    listed = all(len(one) == count for one, count in zip(batches, rows, strict=True))
    if columns and listed and not isinstance(batches[0], tuple):
        raise ValueError(
            f"a list of {rows[0]} entries with {rows[0]} rows each may hold rows or columns; let collate return "
            "columns as a tuple or a mapping, or stack the rows into one tensor"
        )
    if not columns and not listed:
        raise _wrong_rows(batches[0], rows[0])
    return columns


def _are_columns(values: Sequence[Any], rows: int) -> bool:
    return len(values) > 0 and all(_has_rows(value, rows) for value in values)


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == rows
    if isinstance(value, Mapping):
        return _are_columns(list(cast("Mapping[Any, Any]", value).values()), rows)
    if isinstance(value, tuple | list):
        entries = cast("Sequence[Any]", value)
        # A tuple of tensors within a list is a row or columns; as columns, all of its tensors have the rows.
        columns_only = isinstance(value, tuple) and any(isinstance(one, Tensor | Mapping) for one in entries)
        return (len(entries) == rows and not columns_only) or _are_columns(entries, rows)
    return not isinstance(value, str | bytes) and hasattr(value, "__len__") and len(value) == rows


def _wrong_rows(batch: Any, rows: int) -> ValueError:
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    return ValueError(
        f"a batch of {rows} rows holds a {type(batch).__name__}{shape}, which does not have {rows} rows and "
        "cannot be divided among domains; let collate return rows only"
    )
