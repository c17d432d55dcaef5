"""Rows of data by number: what batches are made of."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import collate as torch_collate
from typing_extensions import override

from mixwell.data import readers
from mixwell.data.sources.base import digest_of
from mixwell.data.tokenization import Integers, TokenFile
from mixwell.typing import Indices
from mixwell.utils.nested import like_container

_SAMPLED_ROWS = 256


class IndexedDataset(ABC):
    """Rows that can be read in any order."""

    deterministic: ClassVar[bool] = False
    """Whether reading a row draws no random numbers, so that the reader need not be seeded."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Indices) -> Any:
        """Return some rows as a model takes them: tensors with the rows as first dimension.

        Args:
            indices: shape ``(rows,)``.
        """

    @abstractmethod
    def digest(self) -> str:
        """Return a digest that identifies the data, without reading all of them."""

    def check(self, indices: Indices) -> None:
        """Raise ``IndexError`` if there is no such row."""
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} were asked for, there are {len(self)}")


@final
class TokenRows(IndexedDataset):
    """Rows of tokens: row ``i`` is ``tokens[i * length : (i + 1) * length + 1]``.

    A row has one token more than its length, which is the first of the next row: it is the last one's target.

    Args:
        length: the number of tokens that a model reads at once.
    """

    deterministic = True

    def __init__(self, tokenized: TokenFile, *, length: int, name: str = "the text") -> None:
        if length < 1:
            raise ValueError(f"a row needs at least 1 token, got a length of {length}")
        if tokenized.tokens <= length:
            raise ValueError(
                f"{name} has {tokenized.tokens} tokens, fewer than one row of {length + 1}; "
                "lower model.context or add text"
            )
        self.tokenized, self.length = tokenized, length
        self._array: Integers | None = None

    def __len__(self) -> int:
        return (self.tokenized.tokens - 1) // self.length

    def __getstate__(self) -> dict[str, object]:
        # A memory-mapped array would be copied whole into a worker process.
        return {**self.__dict__, "_array": None}

    @override
    def batch(self, indices: Indices) -> Tensor:
        """Return rows of tokens, int64, shape ``(rows, length + 1)``."""
        self.check(indices)
        if self._array is None:
            self._array = np.asarray(self.tokenized.array())
        places = indices[:, None] * self.length + np.arange(self.length + 1)
        return torch.from_numpy(self._array[places].astype(np.int64))

    @override
    def digest(self) -> str:
        return digest_of("tokens", self.tokenized.digest, self.length)


@final
class TensorRows(IndexedDataset):
    """Rows of one or more tensors with the same first dimension.

    Example:
        >>> rows = TensorRows(torch.arange(6).view(3, 2), torch.tensor([7, 8, 9]))
        >>> rows.batch(np.array([2, 0]))
        (tensor([[4, 5],
                [0, 1]]), tensor([9, 7]))
    """

    deterministic = True

    def __init__(self, *tensors: Tensor) -> None:
        sizes = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
        if not sizes or 0 in sizes:
            raise ValueError(f"expected tensors with rows, got {[tuple(tensor.shape) for tensor in tensors]}")
        if len(set(sizes)) > 1:
            raise ValueError(f"all tensors must have the same number of rows, got {sizes}")
        for tensor in tensors:
            if tensor.is_meta or tensor.layout != torch.strided:
                kind = "no data (the meta device)" if tensor.is_meta else f"the layout {tensor.layout}"
                raise ValueError(f"rows are taken from dense tensors, got one with {kind}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    @override
    def batch(self, indices: Indices) -> Tensor | tuple[Tensor, ...]:
        self.check(indices)
        chosen = torch.from_numpy(indices)
        taken = tuple(tensor[chosen.to(tensor.device)] for tensor in self.tensors)
        return taken[0] if len(taken) == 1 else taken

    @override
    def digest(self) -> str:
        """Return a digest of the shapes, and of rows at even distances."""
        chosen = torch.linspace(0, len(self) - 1, min(len(self), _SAMPLED_ROWS), dtype=torch.float64).long()
        content = hashlib.blake2b(digest_size=20)
        for tensor in self.tensors:
            content.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            rows = tensor.detach()[chosen.to(tensor.device)].cpu().contiguous()
            content.update(rows.reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


@final
class DatasetRows(IndexedDataset):
    """The rows of a map-style PyTorch dataset.

    Args:
        dataset: has ``len(dataset)`` and ``dataset[i]``.
        collate: makes a batch of a list of rows, by default :func:`collate_columns`.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> None:
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"{kind} gives its rows in one order only, but batches are drawn in any order; use a map-style "
                "dataset (with __getitem__ and __len__), for instance list(dataset) if it fits into memory"
            )
        if not hasattr(type(dataset), "__len__"):
            raise ValueError(f"{kind} does not say how many rows it has; give it __len__")
        self.dataset: Any = dataset
        self.collate = collate or _collate_rows
        if not _length(dataset):
            raise ValueError(f"{kind} has no rows")

    def __len__(self) -> int:
        return len(self.dataset)

    @override
    def batch(self, indices: Indices) -> Any:
        self.check(indices)
        return self.collate(readers.fetch(self.dataset, indices.tolist()))

    @override
    def digest(self) -> str:
        """Return a digest of the type and the number of rows only: a row may differ each time it is read."""
        return digest_of("dataset", type(self.dataset).__qualname__, len(self))


def _length(dataset: Any) -> int:
    size = type(dataset).__len__(dataset)
    if not hasattr(size, "__index__") or not 0 <= operator.index(size) < 2**63:
        raise ValueError(f"{type(dataset).__name__} has a length of {size!r}; it must be a number of rows")
    return operator.index(size)


def _collate_rows(rows: list[Any]) -> Any:
    try:
        return collate_columns(rows)
    except (TypeError, RuntimeError) as error:  # rows of None, or tensors of several shapes
        kinds = ", ".join(dict.fromkeys(type(row).__name__ for row in rows))
        raise ValueError(f"rows ({kinds}) cannot be collated to a batch: {error}") from error


def collate_columns(rows: list[Any]) -> Any:
    """Collate rows as ``default_collate`` does, but rows that are tuples or lists to a tuple of columns.

    ``default_collate`` returns a list of columns, which :mod:`mixwell.utils.nested` could take for a list of rows.

    Example:
        >>> collate_columns([(1, "a"), (2, "b")])
        (tensor([1, 2]), ['a', 'b'])
    """
    return torch_collate.collate(rows, collate_fn_map=_COLLATE)


def _collate_sequences(rows: list[Any], *, collate_fn_map: Any) -> Any:
    sizes = sorted({len(row) for row in rows})
    if len(sizes) > 1:
        raise ValueError(
            f"rows must have the same number of entries, got {sizes[0]} to {sizes[-1]}; give collate"
        )
    columns = tuple(
        torch_collate.collate(list(column), collate_fn_map=collate_fn_map)
        for column in zip(*rows, strict=True)
    )
    return like_container(rows[0], columns) if hasattr(rows[0], "_fields") else columns


_COLLATE: dict[Any, Callable[..., Any]] = {
    **torch_collate.default_collate_fn_map,
    tuple: _collate_sequences,
    list: _collate_sequences,
}


def as_rows(made: Any) -> IndexedDataset:
    """Return the rows of a tensor, a tuple of tensors (columns), or a PyTorch dataset; a list is a dataset."""
    if isinstance(made, IndexedDataset):
        return made
    if isinstance(made, Tensor):
        return TensorRows(made)
    if isinstance(made, tuple) and made and all(isinstance(one, Tensor) for one in made):
        return TensorRows(*made)
    if hasattr(made, "__getitem__") and not isinstance(made, Mapping | str | bytes | type):
        return DatasetRows(cast("Dataset[Any]", made))
    raise ValueError(f"expected a PyTorch dataset or tensors with one row each, got {type(made).__name__}")
