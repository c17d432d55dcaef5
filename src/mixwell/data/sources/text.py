"""Plain text files."""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.data.sources.base import SOURCES, FileSource, Patterns, Piece, TextSourceConfig

PIECE_BYTES = 4 << 20
BLOCK_BYTES = 1 << 18
"""What is decoded at once: it stays in a near cache."""
ERRORS = ("strict", "replace", "ignore")
NUL = b"\0"
_TRIES = 1000


@final
@SOURCES.register("files")
class TextFilesConfig(TextSourceConfig):
    """Text files."""

    files: str | list[str]
    """A file, a folder, a pattern (`data/**/*.txt`), or several. Each file is a document."""
    encoding: str = "utf-8"
    """Encoding of the files."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """How to handle bytes that are not in the encoding."""

    @override
    def location(self, base: Path) -> str | None:
        return paths.single_location(self.files, base)

    @override
    def documents(self, base: Path) -> TextFiles:
        return TextFiles(self.files, base=base, encoding=self.encoding, errors=self.errors)


@final
class TextFiles(FileSource):
    """Text files, each of them one document.

    A file is cut into pieces at line ends, or between words where there are none. A byte order mark is left out;
    line ends stay as they are.

    Args:
        base: the folder that relative patterns start from.
        errors: what to do with bytes that the encoding does not have: ``strict`` refuses the file, ``replace``
            and ``ignore`` put a mark or nothing in their place.
        suffixes: in folders, only files with these suffixes.
        piece: the number of bytes to read at a time.
    """

    def __init__(
        self,
        patterns: Patterns,
        *,
        base: Path,
        encoding: str = "utf-8",
        errors: str = "strict",
        suffixes: Sequence[str] | None = None,
        piece: int = PIECE_BYTES,
    ) -> None:
        super().__init__(patterns, base=base, suffixes=suffixes)
        self.encoding, self.errors = check_encoding(encoding, errors), errors
        self._piece = piece

    @override
    def settings(self) -> Mapping[str, object]:
        return {"encoding": self.encoding, "errors": self.errors}

    @override
    def pieces(self) -> Iterator[Piece]:
        for file in self.files:
            parts = self._cut(file)
            part = next(parts, None)
            if part is None:
                warnings.warn(f"{file} is empty; it is left out", stacklevel=2)
            while part is not None:
                (text, read), part = part, next(parts, None)
                yield Piece(text, part is None, read)

    def _cut(self, path: Path) -> Iterator[tuple[str, int]]:
        parts, read, offset = list[str](), 0, 0
        for text, size in self._decoded(path):
            parts.append(text)
            read, offset = read + size, offset + size
            if size and offset % self._piece:
                continue
            rest = "".join(parts)
            if len(rest) >= self._piece:
                at = good_cut(rest)
                yield rest[:at], read
                rest, read = rest[at:], 0
            parts = [rest]
        if rest := "".join(parts):
            yield rest, read

    def _decoded(self, path: Path) -> Iterator[tuple[str, int]]:
        wide = is_wide(self.encoding)
        decoder = codecs.getincrementaldecoder(self.encoding)(self.errors)
        offset, lines, begun = 0, 0, False
        size = self._piece if self._piece % BLOCK_BYTES else BLOCK_BYTES
        try:
            stream = path.open("rb")
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
        with stream:
            while True:
                try:
                    block = stream.read(size)
                except OSError as error:
                    raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
                if not wide and NUL in block:
                    raise _binary(path, f"byte {offset + block.index(NUL)}")
                waiting = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    before = error.object[: error.start].decode(self.encoding, "ignore")
                    byte, line = offset - waiting + error.start, lines + before.count("\n") + 1
                    raise undecodable(f"{path}: byte {byte} (line {line})", error, self.encoding) from None
                if wide and "\0" in text:
                    before = text[: text.index("\0")]
                    raise _binary(path, f"line {lines + before.count(chr(10)) + 1}")
                offset += len(block)
                lines += text.count("\n")
                if text and not begun:
                    text, begun = text.removeprefix("\ufeff"), True
                yield text, len(block)
                if not block:
                    return


def check_encoding(encoding: str, errors: str) -> str:
    """Return the usual name of an encoding; refuse unknown ones, and ``errors`` that are not in :data:`ERRORS`."""
    if errors not in ERRORS:
        raise ValueError(f"errors must be one of {', '.join(ERRORS)}, got {errors!r}")
    try:
        "a".encode(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        raise ValueError(f"there is no text encoding {encoding!r}; try utf-8, utf-16 or latin-1") from None


def is_wide(encoding: str) -> bool:
    """Return whether an encoding (UTF-16, UTF-32) has NUL bytes in plain text."""
    return len("a".encode(encoding)) > 1 and b"\0" in "a".encode(encoding)


def undecodable(where: str, error: UnicodeDecodeError, encoding: str) -> ValueError:
    """Return the error for bytes that an encoding does not have."""
    bad = error.object[error.start : error.end].hex(" ")
    return ValueError(
        f"{where} is not {encoding}: {error.reason} ({bad[:11]}). Give its encoding (encoding: latin-1), or "
        "replace what cannot be read (errors: replace), or leave the file out"
    )


def good_cut(text: str) -> int:
    r"""Return where to cut a text so that its parts have the tokens of the full text, with common tokenizers.

    They never join a letter or digit to the line end after it; so the cut is made between these, failing that
    after a line end, or before a space.

    Returns:
        The last such position above 0.

    Example:
        >>> good_cut("one line\nand a half"), good_cut("no line end"), good_cut("word")
        (8, 7, 4)
    """
    last = at = text.rfind("\n")
    for _ in range(_TRIES):
        if at <= 0:
            break
        if text[at - 1].isalnum():
            return at
        at = text.rfind("\n", 0, at)
    if last >= 0:
        return last + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def _binary(path: Path, where: str) -> ValueError:
    return ValueError(
        f"{path} looks binary (there is a NUL at {where}). Leave the file out; if it is UTF-16 text, say so "
        "(encoding: utf-16)"
    )
