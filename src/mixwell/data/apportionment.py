"""How many rows of each domain a batch has, as whole numbers that follow shares that change."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf
from operator import add, sub
from typing import final

import numpy as np

from mixwell.simplex.projection import project
from mixwell.typing import Vector

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
        >>> [batches.next(np.array([0.5, 0.3, 0.2])) for _ in range(5)]
        [[2, 1, 1], [2, 1, 1], [2, 1, 1], [2, 2, 0], [2, 1, 1]]

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
        self.carry = [0.0] * domains
        """What is due to each domain from before, within rounding of zero in sum; the state."""
        self._shares = b""
        self._targets: list[float] = []
        self._fractions: list[float] = []
        self._least: list[int] = []
        self._most: list[int] = []

    # Lists and not arrays: domains are few, and NumPy takes longer for a call than Python for ten of them.

    def next(self, shares: Vector, *, most: Sequence[int] | None = None) -> list[int]:
        """The counts of the next batch. A domain to which a whole row is due by its share has at least one.

        Args:
            shares: not negative, summing to one, shape ``(m,)``.
            most: rows that a domain can give at all; where it has fewer than ``least`` it gives those.

        Returns:
            Whole numbers that sum to the batch's size, one for each domain; to less only where all domains
            together can give no more.
        """
        self._follow(shares)
        lows, highs, total = self._least, self._most, self.total
        if most is not None:
            highs = list(map(min, highs, most))
            lows = list(map(min, lows, highs))
            total = min(total, sum(highs))
        due = list(map(add, self.carry, self._targets))
        counts = [
            low if (whole := floor(wanted + ROUNDING)) < low else whole if whole < high else high
            for wanted, low, high in zip(due, lows, highs, strict=True)
        ]
        rest = total - sum(counts)
        if rest > 0:
            self._hand_out(rest, counts, due, highs)
        while rest < 0:
            above = [j for j, low in enumerate(lows) if counts[j] > low]
            counts[min(above, key=lambda j: due[j] - counts[j])] -= 1
            rest += 1
        self.carry = list(map(sub, due, counts))
        return counts

    def _follow(self, shares: Vector) -> None:
        """What follows from the shares alone; they mostly are those of the batch before."""
        shares = np.asarray(shares, dtype=np.float64)
        content = shares.tobytes()
        if content == self._shares:
            return
        targets = self.total * shares
        whole = np.floor(targets + ROUNDING).astype(np.int64)
        # Where less than a row is due, one at most: then a domain is in a batch just as often as its share says.
        most = np.where(whole < 1, 1, self.total)
        self._targets, self._most = targets.tolist(), most.tolist()
        self._fractions = np.maximum(targets - whole, 0.0).tolist()
        self._least = np.minimum(max(self.least, 1), whole).tolist()
        self._shares = content

    def _hand_out(self, rest: int, counts: list[int], due: list[float], most: list[int]) -> None:
        """A row each to the domains whose next row must come soonest, those first to which most is due.

        It must come after ``ceil((1 - left) / fraction)`` more batches, since the whole part of a target is given
        in every batch and only its fraction accumulates. Less than a row is left to each of them, so that none
        comes twice; what is to be handed out after them goes to whom most is due.
        """
        waiting = [
            (ceil(batches), -left, j)
            for j, (wanted, count, fraction) in enumerate(zip(due, counts, self._fractions, strict=True))
            if (left := wanted - count) > ROUNDING
            and count < most[j]
            and fraction
            and (batches := (1 - left) / fraction - ROUNDING) < inf
        ]
        waiting.sort()
        for _, _, j in waiting[:rest]:
            counts[j] += 1
        for _ in range(rest - len(waiting)):
            able = [j for j, count in enumerate(counts) if count < most[j]]
            counts[max(able, key=lambda j: due[j] - counts[j])] += 1


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
