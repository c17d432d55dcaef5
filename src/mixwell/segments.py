"""Sums over the rows of each domain in a mixed batch."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Labels = NDArray[np.int64]
"""The number of each row's domain, shape ``(rows,)``."""


@final
class Segments:
    """Which rows of a batch belong to which domain.

    Args:
        labels: the number of each row's domain.
        domains: how many domains there are.

    Example:
        >>> segments = Segments(np.array([1, 0, 1]), 2)
        >>> total = torch.zeros(2, 1)
        >>> segments.add_sums(total, torch.tensor([[[1.0]], [[2.0]], [[4.0]]]))
        >>> total.flatten().tolist()
        [2.0, 5.0]
    """

    def __init__(self, labels: Labels, domains: int) -> None:
        self.labels = labels
        self.counts = np.bincount(labels, minlength=domains)
        """Rows by domain."""
        ends = np.cumsum(self.counts)
        self.present = [
            (j, int(end - n), int(end)) for j, (n, end) in enumerate(zip(self.counts, ends, strict=True)) if n
        ]
        """Of each domain that is there its number, and where its rows begin and end once they are sorted."""
        self._order = (
            None if (np.diff(labels) >= 0).all() else torch.from_numpy(np.argsort(labels, kind="stable"))
        )
        self._even = len(self.present) == domains and len(set(self.counts.tolist())) == 1

    def __len__(self) -> int:
        return len(self.labels)

    def sorted(self, values: Tensor) -> Tensor:
        """Rows in the order of their domains.

        Args:
            values: shape ``(rows, ...)``.

        Returns:
            The same rows; the tensor itself where they are in order.
        """
        if self._order is None:
            return values
        if self._order.device != values.device:
            self._order = self._order.to(values.device)
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
        if values.shape[1] > 1 and self._order is not None:
            values = values.sum(dim=1, keepdim=True)  # less to sort
        values = self.sorted(values)
        if self._even:
            total.add_(values.reshape(len(total), -1, values.shape[-1]).sum(dim=1, dtype=total.dtype))
            return
        for domain, begin, end in self.present:
            total[domain].add_(values[begin:end].sum(dim=(0, 1), dtype=total.dtype))
