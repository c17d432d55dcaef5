"""Adding up vectors in buckets, the linear map of a count sketch (Charikar, Chen, Farach-Colton 2002)."""

from __future__ import annotations

from torch import Tensor


def fold_into(target: Tensor, values: Tensor, start: int, factor: float) -> None:
    """``target[(start + i) mod s] += factor * values[i]``."""
    size = len(target)
    before = start % size
    rows = -(-(before + len(values)) // size)
    padded = values.new_zeros(rows * size)
    padded[before : before + len(values)] = values
    target.add_(padded.view(rows, size).sum(dim=0).to(target.device), alpha=factor)


def prime_below(limit: int) -> int:
    """Return the greatest prime up to a limit, 1 where there is none."""
    for candidate in range(limit, 1, -1):
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            return candidate
    return 1
