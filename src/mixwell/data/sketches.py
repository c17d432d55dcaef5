"""Sketches of texts, from which the overlap of two of them is estimated.

A sketch keeps the least hashes of all distinct lines. Equal lines have equal hashes, so two sketches hold the same
sample of the lines that both texts have (bottom-k sampling: Broder, "On the resemblance and containment of
documents", 1997). Lines are found in any order. Passages, in a second sketch, are found wherever they begin and
end, and however short or long their lines are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from mixwell.data.sources.base import Piece
from mixwell.utils import files

SIZE = 65536
"""The default number of hashes that are kept."""
LINE_CHARACTERS = 32
"""Shorter lines are often equal by chance."""
LONGEST_LINE = 65536
"""Longer lines are truncated, so that a file without line ends needs little memory."""
PASSAGE_BYTES = 64
"""About a dozen words, since whitespace is left out; shorter passages are often equal by chance."""
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
"""ASCII characters that ``str.strip`` removes and ``bytes.strip`` does not."""
_HASH = blake2b(digest_size=_WORD)
"""Copying it is faster than making another."""

Hashes = NDArray[np.uint64]


class Sketch:
    """The least hashes of the parts of a text.

    Args:
        size: the greatest number of hashes.
    """

    unit: ClassVar[str]
    """The plural noun for the parts that are hashed."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._kept: Hashes = np.empty(0, np.uint64)
        self._new_hashes = bytearray()
        self._threshold = _WHOLE

    @property
    def threshold(self) -> int:
        """The greatest value up to which all hashes are kept."""
        self.end()
        self._merge()
        return int(self._threshold)

    @property
    def hashes(self) -> Hashes:
        """The hashes that are kept, sorted."""
        self.end()
        self._merge()
        return self._kept

    @property
    def whole(self) -> bool:
        """Whether all hashes are kept."""
        return self.threshold == _WHOLE

    def end(self) -> None:
        """Complete the part that was begun."""

    def to_array(self) -> Hashes:
        """Return the threshold, then the hashes."""
        return np.concatenate([np.array([self.threshold], np.uint64), self.hashes])

    @classmethod
    def from_array(cls, array: NDArray[Any], size: int = SIZE) -> Self:
        """Return the sketch that :meth:`to_array` described; it can be compared and added to."""
        if array.dtype != np.uint64 or array.ndim != 1 or len(array) < 1:
            raise ValueError(
                f"not a sketch: expected 64-bit hashes in a row, got {array.dtype} {array.shape}"
            )
        sketch = cls(size)
        sketch._keep(np.array(array[1:], np.uint64), int(array[0]))
        return sketch

    def _merge(self) -> None:
        found = np.frombuffer(bytes(self._new_hashes), "<u8").astype(np.uint64)
        self._new_hashes.clear()
        if len(found):
            self._keep(np.concatenate([self._kept, found]), self._threshold)

    def _keep(self, hashes: Hashes, threshold: int) -> None:
        ordered = np.sort(hashes[hashes <= np.uint64(threshold)])
        # Several times as fast as numpy.unique.
        distinct = ordered[np.append(ordered[1:] != ordered[:-1], True)] if len(ordered) else ordered
        if len(distinct) > self._size:
            distinct = distinct[: self._size]
            threshold = int(distinct[-1])
        self._kept, self._threshold = distinct, threshold

    def _add_hashes(self, hashes: bytes) -> None:
        self._new_hashes += hashes
        if len(self._new_hashes) >= _WORD * _GROUP:
            self._merge()


class _TextSketch(Sketch, ABC):
    """A sketch of text that is buffered, since many short documents are hashed faster together."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self._texts: list[str] = []
        self._characters = 0

    def _buffer(self, text: str) -> None:
        self._texts.append(text)
        self._characters += len(text) + 1
        if self._characters >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        self._characters = 0
        for start in range(0, len(text), LONGEST_LINE):
            self._hash(text[start : start + LONGEST_LINE])

    @abstractmethod
    def _hash(self, text: str) -> None:
        """Hash the next text, of at most LONGEST_LINE characters."""


@final
class LineSketch(_TextSketch):
    r"""A sketch of a text's lines of at least 32 characters, without the space around them.

    Example:
        >>> one, other = LineSketch(), LineSketch()
        >>> one.add("a line that is long enough to count here\nand another line that is long enough\n")
        >>> other.add("and another line that ")  # cut in two
        >>> other.add("is long enough")
        >>> overlap(one, other), overlap(other, one)
        (0.5, 1.0)
    """

    unit: ClassVar[str] = "lines"
    _tail = ""

    def add(self, text: str, *, ends: bool = False) -> None:
        """Add the next piece of a text, which may begin and end within a line.

        Args:
            ends: whether a document ends after it, and so its last line.
        """
        self._buffer(text + "\n" if ends else text)

    @override
    def end(self) -> None:
        self._flush()
        self._add_hashes(_hashed(_countable([self._tail])))
        self._tail = ""

    @override
    def _hash(self, text: str) -> None:
        first, last = text.find("\n"), text.rfind("\n")
        # Leading space is removed first, so that a long line is truncated at the same place however it arrives.
        begun = (self._tail + (text if first < 0 else text[:first])).lstrip()[:LONGEST_LINE]
        if first < 0:
            self._tail = begun
            return
        self._tail = text[last + 1 :].lstrip()[:LONGEST_LINE]
        self._add_hashes(_hashed(_countable([begun]) + _countable_lines(text[first + 1 : last + 1])))


def _countable(lines: Iterable[str]) -> list[bytes]:
    """Return the lines that are long enough, without the space around them, in UTF-8."""
    return [stripped.encode() for line in lines if len(stripped := line.strip()) >= LINE_CHARACTERS]


def _countable_lines(text: str) -> list[bytes]:
    """Return the same for a text of short lines; ASCII lines, which are faster as bytes, come first."""
    if any(separator in text for separator in _SEPARATORS):
        return _countable(text.split("\n"))
    lines = text.encode().split(b"\n")
    others: list[bytes] = []
    if not text.isascii():
        others = _countable(line.decode() for line in lines if not line.isascii())
        lines = [line for line in lines if line.isascii()]
    return [stripped for line in lines if len(stripped := line.strip()) >= LINE_CHARACTERS] + others


def _hashed(parts: Iterable[bytes]) -> bytes:
    digests: list[bytes] = []
    for part in parts:
        one = _HASH.copy()
        one.update(part)
        digests.append(one.digest())
    return b"".join(digests)


@final
class PassageSketch(_TextSketch):
    r"""A sketch of all passages of 64 bytes, in which space and line ends are left out.

    There is a passage at every byte, so that all passages of an excerpt are also passages of the full text. The
    upper half of a hash depends on the first eight bytes only, the lower half on the others: so in a long text
    these eight bytes suffice to discard most passages.

    Example:
        >>> whole, excerpt = PassageSketch(), PassageSketch()
        >>> whole.add(" ".join(str(number) for number in range(1000)))
        >>> excerpt.add("\n".join(str(number) for number in range(300, 500)))
        >>> overlap(excerpt, whole)
        1.0
    """

    unit: ClassVar[str] = "passages"
    _tail = _cycle = b""

    def add(self, text: str) -> None:
        """Add the next piece of a text, cut anywhere. Consecutive documents are treated as one text."""
        self._buffer(text)

    @override
    def end(self) -> None:
        """Hash the buffered text; more may follow."""
        self._flush()

    @override
    def _hash(self, text: str) -> None:
        content = self._tail + text.encode().translate(None, _SPACE)
        # Later few passages are hashed, and looking for repetitions would take longer.
        self._hash_bytes(self._without_repetition(content) if self._threshold > _WHOLE >> 4 else content)
        self._tail = content[-(PASSAGE_BYTES - 1) :]

    def _without_repetition(self, content: bytes) -> bytes:
        """Return the content without repetitions, which have the same passages and would all be hashed."""
        period = content.find(content[:PASSAGE_BYTES], 1)
        if period < 0 or content[period:] != content[:-period]:
            return content
        once = content[: period + PASSAGE_BYTES - 1]
        if once in self._cycle:
            return b""
        self._cycle = content[: 2 * period + PASSAGE_BYTES - 1]
        return once

    def _hash_bytes(self, content: bytes) -> None:
        count = len(content) - PASSAGE_BYTES + 1
        if count <= 0:
            return
        # The eight bytes at every position as an integer.
        words = np.ndarray(len(content) - _WORD + 1, "<u8", content, strides=(1,))
        first = words[:count] * _ANCHOR[0]
        places = np.flatnonzero(first <= np.uint64(self._threshold) | _LOW)
        # Where many are needed, hashing all is faster than indexing.
        which = places if len(places) < count // 4 else slice(None)
        first = mixed = first[which]
        for place in range(_WORD, PASSAGE_BYTES, _WORD):
            mixed = (mixed ^ words[place : place + count][which]) * _ANCHOR[place // _WORD % len(_ANCHOR)]
            mixed ^= mixed >> _HALF
        self._add_hashes(((first & ~_LOW) | (mixed & _LOW)).astype("<u8").tobytes())


@final
class BlockSketch(Sketch):
    """A sketch of blocks of 64 tokens, for arrays without their text.

    A block begins where a hash of its first four tokens is below a limit, about once in 64 tokens: so equal
    stretches have equal blocks, wherever in an array they are.
    """

    unit: ClassVar[str] = "blocks"

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self._tail = np.empty(0, "<i4")

    def add(self, tokens: NDArray[Any]) -> None:
        """Add the next tokens of an array.

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
        self._add_hashes(_hashed(blocks))
        self._tail = tokens[count:]


@final
class TextSketches:
    """The sketches of a text's lines and passages, taken while its pieces are read for another purpose."""

    def __init__(self, lines: LineSketch | None = None, passages: PassageSketch | None = None) -> None:
        self.lines = LineSketch() if lines is None else lines
        self.passages = PassageSketch() if passages is None else passages

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces of text unchanged, adding each to the sketches; this saves a second pass."""
        for piece in pieces:
            self.lines.add(piece.text, ends=piece.ends)
            self.passages.add(piece.text)
            yield piece

    def save(self, path: Path) -> None:
        """Write both sketches to a file."""
        with files.replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, lines=self.lines.to_array(), passages=self.passages.to_array())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as kept:
            return cls(LineSketch.from_array(kept["lines"]), PassageSketch.from_array(kept["passages"]))


def overlap(validation: Sketch, domain: Sketch) -> float:
    """Return the fraction of validation's distinct lines (or passages, or blocks) that are also in a domain.

    It is exact where both sketches are whole. Otherwise it is estimated from the hashes that both would have kept;
    ``n`` of them have a standard error of at most ``1 / (2 sqrt(n))``. It is 0 where validation has no parts.
    """
    if validation.unit != domain.unit:
        raise ValueError(f"a sketch of {validation.unit} cannot be compared with one of {domain.unit}")
    limit = np.uint64(min(validation.threshold, domain.threshold))
    sought = validation.hashes[validation.hashes <= limit]
    if not len(sought):
        return 0.0
    return float(np.isin(sought, domain.hashes, assume_unique=True).mean())
