"""How much of one text is also in another, from small samples of both.

A sketch keeps the least hashes of all distinct lines. Equal lines have equal hashes, so two sketches hold the same
sample of the lines that both texts have (bottom-k sampling: Broder, "On the resemblance and containment of
documents", 1997). Lines are found in whatever order they are; passages, which a second sketch keeps, wherever they
begin and end, and however short or long their lines are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

SIZE = 65536
"""Hashes that are kept."""
LINE_CHARACTERS = 32
"""Shorter lines are often equal by chance."""
LONGEST_LINE = 65536
"""Of longer lines only so many first characters count, so that a file without line ends needs little memory."""
PASSAGE_BYTES = 64
"""About a dozen words, since space is left out; shorter passages are often equal by chance."""
BLOCK_TOKENS = 64
_WHOLE = np.iinfo(np.uint64).max
_GROUP = 1 << 16
_ANCHOR = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)
_ANCHOR_SHIFT = np.uint64(58)
_WORD = 8
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_CHUNK = 1 << 17
_SPACE = b" \t\r\n\v\f"
_SEPARATORS = "\x1c", "\x1d", "\x1e", "\x1f"
"""What ``str.strip`` takes for space and ``bytes.strip`` does not, in ASCII."""
_HASH = blake2b(digest_size=_WORD)
"""Copying it takes less time than making another."""

Hashes = NDArray[np.uint64]


class Sketch(ABC):
    """The least hashes of what a text is made of.

    Args:
        size: how many are kept.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._kept: Hashes = np.empty(0, np.uint64)
        self._waiting = bytearray()
        self._threshold = _WHOLE

    @property
    @abstractmethod
    def unit(self) -> str:
        """What is hashed."""

    @property
    def threshold(self) -> int:
        """All hashes up to this one are kept."""
        self.end()
        self._settle()
        return int(self._threshold)

    @property
    def hashes(self) -> Hashes:
        """Those that are kept, sorted."""
        self.end()
        self._settle()
        return self._kept

    @property
    def whole(self) -> bool:
        """Whether nothing was left out."""
        return self.threshold == _WHOLE

    def end(self) -> None:
        """What was begun is complete."""

    def merge(self, other: Self) -> None:
        """Add what another sketch has seen.

        Args:
            other: is not changed, but its last line is taken to be complete.
        """
        self._keep(np.concatenate([self.hashes, other.hashes]), min(self.threshold, other.threshold))

    def to_array(self) -> Hashes:
        """The threshold, then the hashes."""
        return np.concatenate([np.array([self.threshold], np.uint64), self.hashes])

    @classmethod
    def from_array(cls, array: NDArray[Any], size: int = SIZE) -> Self:
        """What :meth:`to_array` described.

        Args:
            array: the threshold, then the hashes.
            size: how many hashes are kept.

        Returns:
            A sketch that can be compared and added to.

        Raises:
            ValueError: it is not such an array.
        """
        if array.dtype != np.uint64 or array.ndim != 1 or len(array) < 1:
            raise ValueError(
                f"not a sketch: expected 64-bit hashes in a row, got {array.dtype} {array.shape}"
            )
        sketch = cls(size)
        sketch._keep(np.array(array[1:], np.uint64), int(array[0]))
        return sketch

    def _settle(self) -> None:
        found = np.frombuffer(bytes(self._waiting), "<u8").astype(np.uint64)
        self._waiting.clear()
        if len(found):
            self._keep(np.concatenate([self._kept, found]), self._threshold)

    def _keep(self, hashes: Hashes, threshold: int) -> None:
        ordered = np.sort(hashes[hashes <= np.uint64(threshold)])
        # numpy.unique takes several times as long
        distinct = ordered[np.append(ordered[1:] != ordered[:-1], True)] if len(ordered) else ordered
        if len(distinct) > self._size:
            distinct = distinct[: self._size]
            threshold = int(distinct[-1])
        self._kept, self._threshold = distinct, threshold

    def _note(self, hashes: bytes) -> None:
        self._waiting += hashes
        if len(self._waiting) >= _WORD * _GROUP:
            self._settle()


@final
class LineSketch(Sketch):
    r"""A sketch of a text's lines of at least 32 characters, without the space around them.

    Args:
        size: how many hashes are kept.

    Example:
        >>> one, other = LineSketch(), LineSketch()
        >>> one.add("a line that is long enough to count here\nand another line that is long enough\n")
        >>> other.add("and another line that ")  # cut in two
        >>> other.add("is long enough")
        >>> overlap(one, other), overlap(other, one)
        (0.5, 1.0)
    """

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self._tail = ""
        self._texts: list[str] = []
        self._characters = 0

    @property
    def unit(self) -> str:
        """Lines."""
        return "lines"

    def add(self, text: str, *, ends: bool = False) -> None:
        """Take the next piece of a text.

        Args:
            text: may begin and end within a line.
            ends: whether a document ends after it, and so its last line.
        """
        # many short documents are cheaper together
        self._texts.append(text)
        self._characters += len(text) + 1
        if ends:
            self._texts.append("\n")
        if self._characters >= _CHUNK:
            self._take()

    def end(self) -> None:
        """The line that was begun is complete."""
        self._take()
        self._note(_hashed(_long_enough([self._tail])))
        self._tail = ""

    def _take(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        self._characters = 0
        # so no line within a part has too many characters
        for start in range(0, len(text), LONGEST_LINE):
            self._split(text[start : start + LONGEST_LINE])

    def _split(self, text: str) -> None:
        first, last = text.find("\n"), text.rfind("\n")
        # leading space goes first, so that a long line is cut at the same place however it arrives
        begun = (self._tail + (text if first < 0 else text[:first])).lstrip()[:LONGEST_LINE]
        if first < 0:
            self._tail = begun
            return
        self._tail = text[last + 1 :].lstrip()[:LONGEST_LINE]
        self._note(_hashed(_long_enough([begun]) + _long_lines(text[first + 1 : last + 1])))


def _long_enough(lines: Iterable[str]) -> list[bytes]:
    """Of lines those that count, without the space around them, in UTF-8."""
    return [
        stripped.encode()
        for line in lines
        if len(line) >= LINE_CHARACTERS and len(stripped := line.strip()) >= LINE_CHARACTERS
    ]


def _long_lines(text: str) -> list[bytes]:
    """The same of a text of short lines; what is ASCII, which takes less time as bytes, apart from the rest."""
    if any(separator in text for separator in _SEPARATORS):
        return _long_enough(text.split("\n"))
    lines = text.encode().split(b"\n")
    others: list[bytes] = []
    if not text.isascii():
        others = _long_enough(line.decode() for line in lines if not line.isascii())
        lines = [line for line in lines if line.isascii()]
    plain = [
        stripped
        for line in lines
        if len(line) >= LINE_CHARACTERS and len(stripped := line.strip()) >= LINE_CHARACTERS
    ]
    return plain + others


def _hashed(parts: Iterable[bytes]) -> bytes:
    digests: list[bytes] = []
    for part in parts:
        one = _HASH.copy()
        one.update(part)
        digests.append(one.digest())
    return b"".join(digests)


@final
class PassageSketch(Sketch):
    r"""A sketch of all passages of 64 bytes, in which space and line ends are left out.

    There is a passage at every byte, so that all passages of an excerpt are those of the text that it was cut out
    of. The upper half of a hash tells the first eight bytes, the lower half the others: so in a long text most
    passages are seen to be none of the least from these eight bytes alone.

    Args:
        size: how many hashes are kept.

    Example:
        >>> whole, excerpt = PassageSketch(), PassageSketch()
        >>> whole.add(" ".join(str(number) for number in range(1000)))
        >>> excerpt.add("\n".join(str(number) for number in range(300, 500)))
        >>> overlap(excerpt, whole)
        1.0
    """

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self._tail = self._cycle = b""
        self._texts: list[str] = []
        self._characters = 0

    @property
    def unit(self) -> str:
        """Passages."""
        return "passages"

    def add(self, text: str) -> None:
        """Take the next piece of a text.

        Args:
            text: may begin and end anywhere. Documents that follow each other are taken for one text.
        """
        if not text:
            return
        # many short documents are cheaper together
        self._texts.append(text)
        self._characters += len(text)
        if self._characters >= _CHUNK:
            self.end()

    def end(self) -> None:
        """What was held back is hashed; more may follow."""
        text = "".join(self._texts)
        self._texts.clear()
        self._characters = 0
        for start in range(0, len(text), _CHUNK):
            content = self._tail + text[start : start + _CHUNK].encode().translate(None, _SPACE)
            # later on few passages are hashed, and looking for repetitions would take longer
            self._hash(self._news(content) if self._threshold > _WHOLE >> 4 else content)
            self._tail = content[-(PASSAGE_BYTES - 1) :]

    def _news(self, content: bytes) -> bytes:
        """What is left when repetitions are left out: they give the same passages, and would all be hashed."""
        period = content.find(content[:PASSAGE_BYTES], 1)
        if period < 0 or content[period:] != content[:-period]:
            return content
        once = content[: period + PASSAGE_BYTES - 1]
        if once in self._cycle:
            return b""
        self._cycle = content[: 2 * period + PASSAGE_BYTES - 1]
        return once

    def _hash(self, content: bytes) -> None:
        count = len(content) - PASSAGE_BYTES + 1
        if count <= 0:
            return
        # the eight bytes at every place, each of them a number
        words = np.ndarray(len(content) - _WORD + 1, "<u8", content, strides=(1,))
        first = words[:count] * _ANCHOR[0]
        places = np.flatnonzero(first <= np.uint64(self._threshold) | _LOW)
        # where many are needed, hashing all is faster than picking them
        which = places if len(places) < count // 4 else slice(None)
        first = mixed = first[which]
        for place in range(_WORD, PASSAGE_BYTES, _WORD):
            mixed = (mixed ^ words[place : place + count][which]) * _ANCHOR[place // _WORD % len(_ANCHOR)]
            mixed ^= mixed >> _HALF
        self._note(((first & ~_LOW) | (mixed & _LOW)).astype("<u8").tobytes())


@final
class BlockSketch(Sketch):
    """A sketch of blocks of 64 tokens, for arrays whose text is not at hand.

    A block begins wherever a hash of its first four tokens says so, about once in 64 tokens: so equal stretches
    have equal blocks, wherever in an array they lie.

    Args:
        size: how many hashes are kept.
    """

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self._tail = np.empty(0, "<i4")

    @property
    def unit(self) -> str:
        """Blocks."""
        return "blocks"

    def add(self, tokens: NDArray[Any]) -> None:
        """Take the next tokens of an array.

        Args:
            tokens: one-dimensional, below ``2**31``.
        """
        for start in range(0, len(tokens), _GROUP):
            self._add(np.concatenate([self._tail, tokens[start : start + _GROUP].astype("<i4")]))

    def _add(self, tokens: NDArray[np.int32]) -> None:
        count = len(tokens) - BLOCK_TOKENS + 1
        if count <= 0:
            self._tail = tokens
            return
        wide = tokens.astype(np.uint64)
        mixed = np.zeros(count, np.uint64)
        for place, factor in enumerate(_ANCHOR):
            mixed = (mixed ^ wide[place : place + count]) * factor
            mixed ^= mixed >> np.uint64(32)
        starts = np.flatnonzero(mixed * _ANCHOR[0] >> _ANCHOR_SHIFT == 0)
        content = tokens.tobytes()
        blocks = {content[4 * start : 4 * (start + BLOCK_TOKENS)] for start in starts.tolist()}
        self._note(_hashed(blocks))
        self._tail = tokens[count:]


def overlap(validation: Sketch, domain: Sketch) -> float:
    """The share of validation's distinct lines (or passages, or blocks) that are also in a domain.

    It is exact where neither sketch left anything out. Otherwise it is estimated from the hashes that both would
    have kept: ``n`` of them give a standard error of at most ``1 / (2 sqrt(n))``.

    Args:
        validation: of the text whose lines are looked for.
        domain: of the text in which they are looked for.

    Returns:
        Between 0 and 1; 0 where validation has no line that counts.

    Raises:
        ValueError: one is of lines, the other of something else.
    """
    if validation.unit != domain.unit:
        raise ValueError(f"a sketch of {validation.unit} cannot be compared with one of {domain.unit}")
    limit = np.uint64(min(validation.threshold, domain.threshold))
    sought = validation.hashes[validation.hashes <= limit]
    if not len(sought):
        return 0.0
    return float(np.isin(sought, domain.hashes, assume_unique=True).mean())
