"""A new order of a domain's rows in every epoch, computed without storing it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.typing import Indices

Words = NDArray[np.uint64]
# The state of a cursor is one number, so looking ahead costs nothing but the time for rows that are never used. It
# doubles from the first number to the second, at which NumPy's calls hardly count, and all is in a near cache.
FIRST_AHEAD = 1 << 12
MOST_AHEAD = 1 << 14
# The orders of several epochs are computed at once for fewer rows than this.
MOST_TOGETHER = 1 << 13
# As arrays, since NumPy would make one of a number at every call.
_SHIFTS = np.array(30, dtype=np.uint64), np.array(27, dtype=np.uint64)
_FACTORS = np.array(0xBF58476D1CE4E5B9, dtype=np.uint64), np.array(0x94D049BB133111EB, dtype=np.uint64)
_BUT_ONE = np.array(63, dtype=np.int64)


def shuffled(positions: Indices, size: int, *keys: str) -> Indices:
    """Return the images of some positions under random permutations of ``range(size)``.

    The swap-or-not shuffle: in each of several rounds ``x`` has the partner ``K - x mod size``, and a random bit
    of the pair decides whether they swap. Any size works exactly, and nothing is stored.

    Args:
        positions: each in ``range(size)``, shape ``(n,)``.
        keys: each selects a permutation.

    Returns:
        The images under one permutation after the other, shape ``(len(keys) * n,)``.

    Example:
        >>> sorted(shuffled(np.arange(10), 10, "any").tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    References:
        Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card Shuffle (CRYPTO 2012).
    """
    pivots, salts = _rounds(size, keys)
    x = np.tile(positions.astype(np.uint64), (len(keys), 1))
    partner, z, room = (np.empty_like(x) for _ in range(3))
    for pivot, beyond, salt in zip(pivots, pivots + np.uint64(size), salts, strict=True):
        # K - x mod size: where K - x is negative, it is huge as an unsigned number, and K + size - x is less.
        np.subtract(pivot, x, out=partner)
        np.subtract(beyond, x, out=room)
        np.minimum(partner, room, out=partner)
        np.maximum(x, partner, out=z)
        z += salt
        _toss(z, room)
        # Chooses between x and its partner without a branch.
        partner ^= x
        partner &= z
        x ^= partner
    return x.astype(np.int64).reshape(-1)


def _rounds(size: int, keys: Sequence[str]) -> tuple[Words, Words]:
    """Return the numbers K and the salts of all rounds, shape ``(rounds, len(keys), 1)`` each."""
    # The pairs of neighboring positions are mixed after about log2(size) rounds, and single ones much sooner.
    rounds = 24 + 6 * size.bit_length()
    drawn = b"".join(hashlib.shake_256(key.encode()).digest(16 * rounds) for key in keys)
    seeds = np.frombuffer(drawn, dtype="<u8").astype(np.uint64).reshape(len(keys), rounds, 2).swapaxes(0, 1)
    return seeds[..., :1] % np.uint64(size), seeds[..., 1:]


def _toss(z: Words, room: Words) -> None:
    """Replace salted numbers by random bits: the first bit of SplitMix64's finalizer, copied to all bits.

    Args:
        room: a buffer of the same shape.
    """
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        np.right_shift(z, shift, out=room)
        z ^= room
        z *= factor
    signed = z.view(np.int64)
    np.right_shift(signed, _BUT_ONE, out=signed)


@final
class ShuffledCursor:
    """A position in a domain: returns its rows in a new order in every epoch, none twice within an epoch.

    Args:
        size: the number of rows.
        key: selects the orders; two cursors with the same key return the same rows.
        taken: the number of rows taken before.

    Example:
        >>> cursor = ShuffledCursor(3, "seed 0, web")
        >>> sorted(cursor.take(3).tolist()), cursor.epoch
        ([0, 1, 2], 1)
    """

    def __init__(self, size: int, key: str, *, taken: int = 0) -> None:
        if size < 1:
            raise ValueError(f"{key}: there are no rows to take")
        self.size = size
        self.taken = taken
        """The number of rows taken, which is the whole state."""
        self._key = key
        self._ahead = np.empty(0, dtype=np.int64)
        self._ahead_from = taken
        self._further = FIRST_AHEAD

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.taken // self.size

    def take(self, count: int) -> Indices:
        """Return the indices of the next ``count`` rows."""
        begin = self.taken - self._ahead_from
        end = begin + count
        if begin < 0 or end > len(self._ahead):
            self._look_ahead(count)
            begin, end = 0, count
        self.taken += count
        return self._ahead[begin:end]

    def _look_ahead(self, count: int) -> None:
        begin, place = self.taken - self._ahead_from, self._ahead_from + len(self._ahead)
        if not 0 <= begin <= len(self._ahead):  # the cursor was moved
            begin, place = len(self._ahead), self.taken
        parts = [self._ahead[begin:]]
        until = self.taken + max(count, self._further)
        while place < until:
            parts.append(self._rows(place, until - place))
            place += len(parts[-1])
        self._ahead, self._ahead_from = np.concatenate(parts), self.taken
        self._further = min(2 * self._further, MOST_AHEAD)

    def _rows(self, place: int, count: int) -> Indices:
        """Return about ``count`` rows from a position on, or those up to the end of its epoch."""
        epoch, first = divmod(place, self.size)
        if self.size < MOST_TOGETHER and not first:
            epochs = range(epoch, epoch + 1 + count // self.size)
            return shuffled(np.arange(self.size), self.size, *map(self._of, epochs))
        return shuffled(np.arange(first, min(first + count, self.size)), self.size, self._of(epoch))

    def _of(self, epoch: int) -> str:
        return f"{self._key}, epoch {epoch}"
