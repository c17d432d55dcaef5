"""How many rows of each domain a batch has, as whole numbers that follow shares that change."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.constraints import project
from mixwell.weights import Vector

Counts = NDArray[np.int64]
# Sums of shares are rounded; what is this near to a whole number counts as whole.
ROUNDING = 1e-9


@final
class Apportionment:
    """Cuts batches of a fixed size by shares, carrying what rounding left over.

    With ``d_j = carry_j + B p_j`` what is due to domain j, it gets ``floor(d_j)`` rows, and the rows that are left
    go to the domains whose rest must be rounded up soonest if the shares stay as they are (the earliest
    deadline first, as Tijdeman's solution of the chairman assignment problem has it). ``carry_j = d_j - n_j``.

    - The counts sum to ``B`` and none is below ``least`` (where its share and the limits do not say otherwise).
    - While the shares stay as they are, the sum of the counts of each domain is at all times within one row of
      the sum of what was due to it; with shares that change, too, as long as ``B p_j >= max(least, 1) + 1``.
      Below that, a change can cost some rows for a while, which are then made up for. (No rule that does not
      see the future can avoid it: uniform shares over ever fewer of m domains leave one of them
      ``1/m + ... + 1/2`` behind.)

    Args:
        total: B, the rows of a batch.
        domains: how many there are.
        least: rows that each domain has in every batch.

    Raises:
        ValueError: a batch is too small.

    Example:
        >>> batches = Apportionment(4, 3)
        >>> [batches.next(np.array([0.5, 0.3, 0.2])).tolist() for _ in range(5)]
        [[2, 1, 1], [2, 1, 1], [2, 2, 0], [2, 1, 1], [2, 1, 1]]

    References:
        Tijdeman: The chairman assignment problem (Discrete Mathematics 32, 1980).
    """

    def __init__(self, total: int, domains: int, *, least: int = 0) -> None:
        if total < 1:
            raise ValueError(f"a batch needs at least 1 row, got {total}")
        if least < 0 or least * domains > total:
            raise ValueError(
                f"a batch of {total} rows has no room for {least} of each of {domains} domains; take a larger "
                "batch or fewer rows that each domain must have"
            )
        self.total = total
        self.least = least
        self.carry = np.zeros(domains)
        """What is due to each domain from before, within rounding of zero in sum; the state."""

    def next(self, shares: Vector, *, most: Counts | None = None) -> Counts:
        """The counts of the next batch. A domain to which a whole row is due by its share has at least one.

        Args:
            shares: not negative, summing to one, shape ``(m,)``.
            most: rows that a domain can give at all; where it has fewer than ``least`` it gives those.

        Returns:
            Whole numbers that sum to the batch's size, shape ``(m,)``; to less only where all domains
            together can give no more.
        """
        targets = self.total * np.asarray(shares, dtype=np.float64)
        due = self.carry + targets
        # Where less than a row is due, one at most: then a domain is in a batch just as often as its share says.
        whole = np.floor(targets + ROUNDING).astype(np.int64)
        able = np.where(whole < 1, 1, self.total)
        most = able if most is None else np.minimum(most, able)
        least = np.minimum(np.minimum(max(self.least, 1), whole), most)
        counts = np.clip(np.floor(due + ROUNDING).astype(np.int64), least, most)
        rest = int(min(self.total, most.sum()) - counts.sum())
        while rest > 0:
            counts[self._first_due(due - counts, targets, counts < most)] += 1
            rest -= 1
        while rest < 0:
            counts[np.where(counts > least, due - counts, np.inf).argmin()] -= 1
            rest += 1
        self.carry = due - counts
        return counts

    @staticmethod
    def _first_due(left: Vector, targets: Vector, able: NDArray[np.bool_]) -> int:
        """The domain whose next row must come soonest: after ``ceil((1 - left) / target)`` more batches."""
        with np.errstate(divide="ignore", invalid="ignore"):
            batches = np.where(left > ROUNDING, np.ceil((1 - left) / targets - ROUNDING), np.inf)
        waiting = np.where(able, batches, np.inf)
        if np.isfinite(waiting).any():
            first = waiting == waiting.min()
            return int(np.where(first, left, -np.inf).argmax())
        return int(np.where(able, left, -np.inf).argmax())


def by_weight_and_noise(weights: Vector, noise: Vector) -> Vector:
    """Shares that give ``sum_j w_j g_j`` the least variance for a number of rows.

    ``n_j ~ w_j s_j``, since the variance is ``sum_j w_j^2 s_j^2 / n_j`` (Neyman's allocation).

    Args:
        weights: of the domains, shape ``(m,)``.
        noise: s_j, the standard deviation of the gradient of one row, shape ``(m,)``; 0 or NaN where it is not
            known, for which the mean of the others is taken.

    Returns:
        Shares that sum to one, shape ``(m,)``.

    Example:
        >>> by_weight_and_noise(np.array([0.5, 0.5]), np.array([1.0, 3.0])).tolist()
        [0.25, 0.75]
    """
    known = np.isfinite(noise) & (noise > 0)
    scale = np.where(known, noise, noise[known].mean() if known.any() else 1.0)
    shares = weights * scale
    return shares / shares.sum()


def within(shares: Vector, low: Vector, high: Vector) -> Vector:
    """Shares moved into bounds, those that are free keeping their proportions.

    ``clip(s p_j, low_j, high_j)`` with the s for which they sum to one.

    Args:
        shares: positive, shape ``(m,)``.
        low: the least, shape ``(m,)``.
        high: the greatest, shape ``(m,)``.

    Returns:
        Shares that sum to one (to less where ``high`` does), shape ``(m,)``.

    Example:
        >>> within(np.array([0.8, 0.1, 0.1]), np.zeros(3), np.array([0.5, 1.0, 1.0])).tolist()
        [0.5, 0.25, 0.25]
    """
    if high.sum() <= 1:
        return high
    with np.errstate(divide="ignore"):
        return np.exp(project(np.log(shares), np.minimum(low, high), high))
