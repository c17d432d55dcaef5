"""Sums over the rows of each domain in a mixed batch."""

from __future__ import annotations

from itertools import accumulate
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Labels = NDArray[np.int64]
"""The number of each row's domain, shape ``(rows,)``."""


@final
class RowGroups:
    """Which rows of a batch belong to which domain.

    Args:
        labels: the number of each row's domain.
        domains: how many domains there are.

    Example:
        >>> segments = RowGroups(np.array([1, 0, 1]), 2)
        >>> total = torch.zeros(2, 1)
        >>> segments.add_sums(total, torch.tensor([[[1.0]], [[2.0]], [[4.0]]]))
        >>> total.flatten().tolist()
        [2.0, 5.0]
    """

    def __init__(self, labels: Labels, domains: int) -> None:
        self.labels = labels
        self.counts = np.bincount(labels, minlength=domains)
        """Rows by domain."""
        counts = self.counts.tolist()
        begins = [0, *accumulate(counts)]
        self.present = [(j, begins[j], begins[j + 1]) for j, n in enumerate(counts) if n]
        """Of each domain that is there its number, and where its rows begin and end once they are sorted."""
        self._in_order = bool((labels[1:] >= labels[:-1]).all())
        self._order = torch.from_numpy(np.argsort(labels, kind="stable"))
        self._begins = torch.tensor(begins[:-1])
        self._even = min(counts) == max(counts)

    def __len__(self) -> int:
        return len(self.labels)

    def sorted(self, values: Tensor) -> Tensor:
        """Rows in the order of their domains.

        Args:
            values: shape ``(rows, ...)``.

        Returns:
            The same rows; the tensor itself where they are in order.
        """
        if self._in_order:
            return values
        self._move_to(values.device)
        return values.index_select(0, self._order)

    def split(self, values: Tensor) -> Tensor:
        """Rows with whatever is in each row as one dimension.

        Args:
            values: shape ``(rows, ..., n)``, or ``(rows * length, n)`` where a layer sees them flattened.

        Returns:
            Shape ``(rows, length, n)``.

        Raises:
            ValueError: the first dimension is not that of the rows.
        """
        if values.dim() < 2 or values.shape[0] % len(self):
            raise ValueError(
                f"it sees a tensor of shape {tuple(values.shape)}, whose first dimension is not the {len(self)} "
                "rows of the batch"
            )
        return values.reshape(len(self), -1, values.shape[-1])

    def add_products(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """``total_j += left_j^T right_j`` over the rows of every domain.

        Args:
            total: shape ``(m, a, b)``.
            left: shape ``(rows, length, a)``.
            right: shape ``(rows, length, b)``.
        """
        left, right = (self.sorted(side).to(total.dtype) for side in (left, right))
        if self._even:
            parts = (side.reshape(len(total), -1, side.shape[-1]) for side in (left, right))
            first, second = parts
            total.baddbmm_(first.transpose(1, 2), second)
            return
        for domain, begin, end in self.present:
            total[domain].addmm_(left[begin:end].flatten(0, 1).t(), right[begin:end].flatten(0, 1))

    def add_sums(self, total: Tensor, values: Tensor) -> None:
        """``total_j += sum of the rows`` of every domain.

        Args:
            total: shape ``(m, n)``.
            values: shape ``(rows, length, n)``.
        """
        self._move_to(values.device)
        if values.shape[1] > 1:
            values = values.sum(dim=1, keepdim=True, dtype=total.dtype)
        # A bag of embeddings is a sum of chosen rows, which are read once and not copied.
        total.add_(torch.embedding_bag(values.squeeze(1).to(total.dtype), self._order, self._begins)[0])

    def _move_to(self, device: torch.device) -> None:
        if self._order.device != device:
            self._order, self._begins = self._order.to(device), self._begins.to(device)
