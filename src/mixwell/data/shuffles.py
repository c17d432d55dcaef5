"""A new order of a domain's rows in every epoch, without holding it in memory."""

from __future__ import annotations

import hashlib
from typing import final

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
# The state of a cursor is one number, so looking ahead costs nothing but the time for rows that are never used.
AHEAD = 512


def shuffled(positions: Indices, size: int, key: str) -> Indices:
    """Where a random permutation of ``range(size)`` sends some positions.

    The swap-or-not shuffle: in each of some rounds ``x`` has the partner ``K - x mod size``, and a coin that
    belongs to the pair says whether they swap. Any size works exactly, and nothing is stored.

    Args:
        positions: each in ``range(size)``.
        size: of what is permuted.
        key: chooses the permutation.

    Returns:
        The images, of the same shape.

    Example:
        >>> sorted(shuffled(np.arange(10), 10, "any").tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    References:
        Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card Shuffle (CRYPTO 2012).
    """
    x = positions.astype(np.int64)
    # The pairs of neighbouring positions are mixed after about log2(size) rounds, and single ones much sooner.
    rounds = 24 + 6 * size.bit_length()
    seeds = np.frombuffer(hashlib.shake_256(key.encode()).digest(16 * rounds), dtype="<u8").reshape(rounds, 2)
    for pivot, salt in seeds:
        partner = (np.int64(pivot % np.uint64(size)) - x) % size
        x = np.where(_coin(np.maximum(x, partner), salt), partner, x)
    return x


def _coin(x: Indices, salt: np.uint64) -> NDArray[np.bool_]:
    """A bit that depends on a number and on the salt: the finaliser of SplitMix64."""
    z = x.astype(np.uint64) + salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(63)) != 0


@final
class Cursor:
    """A place in a domain whose rows come in a new order in every epoch, none twice before the epoch ends.

    Args:
        size: the number of rows.
        key: chooses the orders; two cursors with the same key give the same rows.
        taken: how many rows were taken before.

    Raises:
        ValueError: there are no rows.

    Example:
        >>> cursor = Cursor(3, "seed 0, web")
        >>> sorted(cursor.take(3).tolist()), cursor.epoch
        ([0, 1, 2], 1)
    """

    def __init__(self, size: int, key: str, *, taken: int = 0) -> None:
        if size < 1:
            raise ValueError(f"{key}: there are no rows to take")
        self.size = size
        self.taken = taken
        """How many rows were taken; all that a resumed run needs to know."""
        self._key = key
        self._ahead = np.empty(0, dtype=np.int64)
        self._ahead_from = 0

    @property
    def epoch(self) -> int:
        """How often all rows were taken."""
        return self.taken // self.size

    def take(self, count: int) -> Indices:
        """The next rows.

        Args:
            count: how many.

        Returns:
            Their indices, shape ``(count,)``.
        """
        begin = self.taken - self._ahead_from
        if begin < 0 or begin + count > len(self._ahead):
            self._ahead, self._ahead_from, begin = (
                self._order(max(count, min(AHEAD, self.size))),
                self.taken,
                0,
            )
        self.taken += count
        return self._ahead[begin : begin + count]

    def _order(self, count: int) -> Indices:
        parts: list[Indices] = []
        place = self.taken
        while count > 0:
            epoch, first = divmod(place, self.size)
            here = min(count, self.size - first)
            positions = np.arange(first, first + here)
            parts.append(shuffled(positions, self.size, f"{self._key}, epoch {epoch}"))
            place, count = place + here, count - here
        return np.concatenate(parts)
