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
# Orders of this many rows are computed as a whole, which is faster per row; for fewer rows, several at once.
LEAST_WHOLE = 1 << 13
MOST_WHOLE = 1 << 16
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
        # K - x mod size: where K - x is negative it is a huge number without its sign, and K + size - x the lesser
        np.subtract(pivot, x, out=partner)
        np.subtract(beyond, x, out=room)
        np.minimum(partner, room, out=partner)
        np.maximum(x, partner, out=z)
        z += salt
        _toss(z, room)
        # chooses between x and its partner without a branch
        partner ^= x
        partner &= z
        x ^= partner
    return x.astype(np.int64).reshape(-1)


def whole_order(size: int, key: str) -> Indices:
    """Return ``shuffled(np.arange(size), size, key)`` faster, by drawing the random bit of each pair once.

    ``at[v]`` is the position that has the image ``v`` so far. The pairs of a round are two slices of it, up to K
    and beyond, each with its reverse: the numbers of the upper halves are consecutive, so nothing is looked up.

    Example:
        >>> whole_order(9, "any").tolist() == shuffled(np.arange(9), 9, "any").tolist()
        True
    """
    pivots, salts = _rounds(size, [key])
    at, numbers = np.arange(size), np.arange(size, dtype=np.uint64)
    coins, room = (np.empty(size // 2 + 1, np.uint64) for _ in range(2))
    for pivot, salt in zip(pivots.ravel().tolist(), salts[:, 0], strict=True):
        middle = pivot + 1
        first, second = middle // 2, (size - middle) // 2
        z, other = coins[: first + second], room[: first + second]
        np.add(numbers[middle - first : middle], salt, out=z[:first])
        np.add(numbers[size - second :], salt, out=z[first:])
        _toss(z, other)
        swap, change = z.view(np.int64), other.view(np.int64)
        for begin, end, half in ((0, middle, slice(first)), (middle, size, slice(first, None))):
            count = len(swap[half])
            upper, lower = at[end - count : end], at[begin : begin + count][::-1]
            moved = change[half]
            np.bitwise_xor(upper, lower, out=moved)
            moved &= swap[half]
            upper ^= moved
            lower ^= moved
    images = np.empty_like(at)
    images[at] = np.arange(size)
    return images


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
    """A position in a domain, which gives its rows in a new order in every epoch, none twice within an epoch.

    Args:
        size: the number of rows.
        key: selects the orders; two cursors with the same key give the same rows.
        taken: the number of rows taken before.

    Raises:
        ValueError: there are no rows.

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
        """How many rows were taken; all that a resumed run needs to know."""
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
        if self.size < LEAST_WHOLE and not first:
            epochs = range(epoch, epoch + 1 + count // self.size)
            return shuffled(np.arange(self.size), self.size, *map(self._of, epochs))
        if LEAST_WHOLE <= self.size <= min(MOST_WHOLE, 4 * count):
            return whole_order(self.size, self._of(epoch))[first:]
        return shuffled(np.arange(first, min(first + count, self.size)), self.size, self._of(epoch))

    def _of(self, epoch: int) -> str:
        return f"{self._key}, epoch {epoch}"
