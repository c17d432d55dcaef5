"""Sums over the rows of each domain in a mixed batch: ``sum_{i in j} y_i^T x_i`` and ``sum_{i in j} y_i``."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Labels = NDArray[np.int64]
"""The index of each row's domain, shape ``(rows,)``."""
# Without numbers, which differ between ranks: it is a reason in the state, and the states of ranks must agree.
FIRST_DIMENSION = "the first dimension of its input is not the batch"


@final
class RowGroups:
    """The rows of a batch, grouped by domain.

    Example:
        >>> groups = RowGroups(np.array([1, 0, 1]), 2)
        >>> total = torch.zeros(2, 1)
        >>> groups.add_sums(total, torch.tensor([[[1.0]], [[2.0]], [[4.0]]]))
        >>> total.flatten().tolist()
        [2.0, 5.0]
    """

    def __init__(self, labels: Labels, domains: int) -> None:
        self.labels = labels
        self.counts = np.bincount(labels, minlength=domains)
        """Rows by domain."""
        counts = self.counts.tolist()
        begins = [0, *accumulate(counts)]
        self.slices = [(j, begins[j], begins[j + 1]) for j, n in enumerate(counts) if n]
        """``(domain, begin, end)`` of the rows of each domain in the batch, once they are sorted."""
        self._even = min(counts) == max(counts)
        self._device: torch.device | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def span_count(self) -> int:
        """The number of times that rows of one domain follow each other."""
        return 1 + int(np.count_nonzero(self.labels[1:] != self.labels[:-1]))

    @cached_property
    def spans(self) -> dict[int, list[tuple[int, int]]]:
        """``(begin, end)`` of the rows of each domain in the batch, one pair for all rows in succession."""
        borders = np.flatnonzero(np.diff(self.labels)) + 1
        found: dict[int, list[tuple[int, int]]] = {domain: [] for domain, _, _ in self.slices}
        for begin, end in pairwise([0, *borders.tolist(), len(self.labels)]):
            found[int(self.labels[begin])].append((begin, end))
        return found

    def counts_where(self, counted: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        """Return the rows by domain among those that count, shape ``(m,)``; ``None`` for all."""
        if counted is None:
            return self.counts
        return np.bincount(self.labels[counted], minlength=len(self.counts))

    def sort_rows(self, values: Tensor) -> Tensor:
        """Return the rows in the order of their domains; the tensor itself where they are in order."""
        if self._in_order:
            return values
        self._move_to(values.device)
        return values.index_select(0, self._order)

    def take(self, values: Tensor, begin: int, end: int, *, dim: int = 0) -> Tensor:
        """Return some of the sorted rows, those of a domain for its ``begin`` and ``end`` in :attr:`slices`.

        Args:
            values: with ``rows`` or ``rows * length`` entries along ``dim``.
        """
        split = self._split(values, dim)
        if self._in_order:
            return split.narrow(dim, begin, end - begin).flatten(dim, dim + 1)
        self._move_to(values.device)
        return split.index_select(dim, self._order[begin:end]).flatten(dim, dim + 1)

    def mask(self, values: Tensor, begin: int, end: int, *, dim: int = 0) -> Tensor:
        """Return the values with zeros outside of some of the sorted rows; see :meth:`take`."""
        self._move_to(values.device)
        split, places = self._split(values, dim), self._order[begin:end]
        masked = torch.zeros_like(split).index_copy_(dim, places, split.index_select(dim, places))
        return masked.flatten(dim, dim + 1)

    def has_rows(self, values: Tensor, dim: int = 0) -> bool:
        """Return whether a dimension has the size of the rows, or a multiple of it."""
        shape = values.shape
        return len(shape) > dim and shape[dim] > 0 and shape[dim] % len(self.labels) == 0

    def check_rows(self, values: Tensor, dim: int = 0) -> None:
        """Raise ``ValueError`` where the values have no rows."""
        if not self.has_rows(values, dim):
            raise ValueError(FIRST_DIMENSION)

    def _split(self, values: Tensor, dim: int) -> Tensor:
        self.check_rows(values, dim)
        return values.unflatten(dim, (len(self), -1))

    def per_row(self, values: Tensor) -> Tensor:
        """Reshape a layer's input or output to ``(rows, length, n)``.

        Args:
            values: shape ``(rows, ..., n)``, or ``(rows * length, n)`` where a layer sees them flattened.
        """
        if values.dim() < 2 or values.shape[0] % len(self):
            raise ValueError(FIRST_DIMENSION)
        length = math.prod(values.shape[:-1]) // len(self)  # -1 is ambiguous without elements
        return values.reshape(len(self), length, values.shape[-1])

    def add_products(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total_j += left_j^T right_j`` over the rows of every domain.

        Args:
            total: shape ``(m, a, b)``.
            left: shape ``(rows, length, a)``.
            right: shape ``(rows, length, b)``.
        """
        left, right = (self.sort_rows(side).to(total.dtype) for side in (left, right))
        if self._even:  # one batched product for all domains
            first, second = (side.reshape(len(total), -1, side.shape[-1]) for side in (left, right))
            total.baddbmm_(first.transpose(1, 2), second)
            return
        for domain, begin, end in self.slices:
            total[domain].addmm_(left[begin:end].flatten(0, 1).t(), right[begin:end].flatten(0, 1))

    def add_sums(self, total: Tensor, values: Tensor) -> None:
        """``total_j += sum of the rows`` of every domain.

        Args:
            total: shape ``(m, n)``.
            values: shape ``(rows, length, n)``.
        """
        self._move_to(values.device)
        if values.shape[1] != 1:  # in the dtype of the total: bfloat16 loses terms of a long sum
            values = values.sum(dim=1, keepdim=True, dtype=total.dtype)
        # embedding_bag sums selected rows, which are read once and not copied.
        total.add_(torch.embedding_bag(values.squeeze(1).to(total.dtype), self._order, self._begins)[0])

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over the rows of every domain, shape ``(m,)``, of one value per row."""
        labels = torch.from_numpy(self.labels).to(values.device)
        return values.new_zeros(len(self.counts)).index_add_(0, labels, values)

    @cached_property
    def _in_order(self) -> bool:
        return bool((self.labels[1:] >= self.labels[:-1]).all())

    def _move_to(self, device: torch.device) -> None:
        """Have on a device the numbers of the rows in the order of their domains, and where each domain begins."""
        if self._device == device:
            return
        # Stable, so that the order (and rounding) of a domain's sum does not depend on the rows of other domains.
        self._order = torch.from_numpy(np.argsort(self.labels, kind="stable")).to(device)
        self._begins = torch.from_numpy(np.cumsum(self.counts) - self.counts).to(device)
        self._device = device
