"""The number of rows of each domain in a batch, as whole numbers that follow changing shares."""

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
    """Divides batches of a fixed size by shares, and carries the rounding error to the next batch.

    With ``d_j = carry_j + B p_j`` rows due to domain j, it gets ``floor(d_j)``, and the rows that are left go to
    the domains with the rests that must be rounded up soonest if the shares do not change (the earliest deadline
    first, as in Tijdeman's solution of the chairman assignment problem). ``carry_j = d_j - n_j``.

    - The counts sum to ``B`` and none is below ``least`` (where its share and the limits do not say otherwise).
    - While the shares stay as they are, the sum of the counts of each domain is at all times within one row of
      the sum of what was due to it; with shares that change, too, as long as ``B p_j >= max(least, 1) + 1``.
      Below that, a change can cost some rows for a while, which are then made up for. (No rule that does not
      see the future can avoid it: uniform shares over ever fewer of m domains leave one of them
      ``1/m + ... + 1/2`` behind.)

    Args:
        total: B, the rows of a batch.
        domains: m, the number of domains.
        least: rows that each domain has in every batch.

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
        """The rows due to each domain from earlier batches, zero in sum within rounding; the state."""
        self._shares = b""
        # Lists and not arrays: domains are few, and NumPy takes longer for a call than Python for ten of them.
        self._targets, self._fractions = list[float](), list[float]()
        self._least, self._most = list[int](), list[int]()

    def next(self, shares: Vector, *, most: Sequence[int] | None = None) -> list[int]:
        """Return the counts of the next batch. A domain to which a whole row is due by its share has at least one.

        Args:
            shares: not negative, summing to one, shape ``(m,)``.
            most: the greatest number of rows of each domain, which comes before ``least``.

        Returns:
            Whole numbers that sum to B, or to the sum of ``most`` where that is less.
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
        """Compute what depends on the shares only, which are mostly those of the batch before."""
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
        """Give a row each to the domains with the earliest deadline of their next row, the most due first.

        The deadline is after ``ceil((1 - left) / fraction)`` more batches, since the whole part of a target is
        given in every batch and only its fraction accumulates. Less than a row is left to each of them, so that
        none comes twice; further rows go to the domains to which most is due.
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
    """Return ``clip(s p_j, low_j, high_j)`` with the s for which they sum to one, all of shape ``(m,)``.

    Shares within the bounds keep their proportions. Where ``high`` sums to less than one, return ``high``.

    Example:
        >>> within(np.array([0.8, 0.1, 0.1]), np.zeros(3), np.array([0.5, 1.0, 1.0])).tolist()
        [0.5, 0.25, 0.25]
    """
    if high.sum() <= 1:
        return high
    with np.errstate(divide="ignore"):
        return np.exp(project(np.log(shares), np.minimum(low, high), high))
