"""Files with one JSON object per line."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import BinaryIO, Literal, cast, final

from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.data.sources.base import SOURCES, FileSource, Patterns, Piece, TextSourceConfig, document_pieces
from mixwell.data.sources.text import check_encoding, is_wide, undecodable

SUFFIXES = tuple(kind + end for kind in (".jsonl", ".ndjson", ".json") for end in ("", ".gz"))
LONGEST_LINE = 128 << 20
"""Bytes. A small compressed file can hold a line that takes more memory than there is."""
_GZIP = b"\x1f\x8b"


@final
@SOURCES.register("jsonl")
class JsonLinesConfig(TextSourceConfig):
    """Files of JSON Lines."""

    jsonl: str | list[str]
    """Files, also compressed by gzip; the text is in `field`."""
    field: str = "text"
    """The field that holds the text."""
    encoding: str = "utf-8"
    """Encoding of the files."""
    errors: Literal["strict", "replace", "ignore"] = "strict"
    """How to handle bytes that are not in the encoding."""

    @override
    def location(self, base: Path) -> str | None:
        return paths.single_location(self.jsonl, base)

    @override
    def documents(self, base: Path) -> JsonLines:
        return JsonLines(self.jsonl, base=base, field=self.field, encoding=self.encoding, errors=self.errors)


@final
class JsonLines(FileSource):
    """Documents in files of JSON lines, compressed by gzip or not. Blank lines are skipped.

    Args:
        patterns: in folders, only files with a suffix of JSON Lines.
        base: the folder that relative patterns start from.
        field: the name of the field with the text.
        errors: how to handle bytes that are not in the encoding, as in
            :class:`mixwell.data.sources.text.TextFiles`.
    """

    def __init__(
        self,
        patterns: Patterns,
        *,
        base: Path,
        field: str = "text",
        encoding: str = "utf-8",
        errors: str = "strict",
    ) -> None:
        super().__init__(patterns, base=base, suffixes=SUFFIXES)
        self.field = field
        self.encoding, self.errors = check_encoding(encoding, errors), errors
        if is_wide(encoding):
            raise ValueError(f"JSON lines cannot be read as {encoding}; convert the files to UTF-8")

    @override
    def settings(self) -> Mapping[str, object]:
        return {"field": self.field, "encoding": self.encoding, "errors": self.errors}

    @override
    def pieces(self) -> Iterator[Piece]:
        yield from document_pieces(self._values(), name=self.name, field=self.field)

    def _values(self) -> Iterator[tuple[object, str, int]]:
        for file in self.files:
            for number, line, read in _lines(file):
                where = f"{file}:{number}"
                document = self._document(where, line, first=number == 1)
                if document is not None:
                    yield document[self.field], where, read

    def _document(self, where: str, line: bytes, *, first: bool) -> Mapping[str, object] | None:
        try:
            text = line.decode(self.encoding, self.errors)
        except UnicodeDecodeError as error:
            raise undecodable(f"{where}: byte {error.start} of the line", error, self.encoding) from None
        text = (text.removeprefix("\ufeff") if first else text).strip()
        if not text:
            return None
        try:
            found: object = json.loads(text)
        except json.JSONDecodeError as error:
            reason = f"{error.msg}: column {error.colno}"
            raise ValueError(f"{where}: not JSON ({reason}); every line must be one JSON object") from None
        except ValueError:  # Python refuses to read integers beyond a length
            raise ValueError(
                f"{where}: a number is too long to be read (more than {sys.get_int_max_str_digits()} digits); "
                "write it as text, or remove this document"
            ) from None
        except RecursionError:
            raise ValueError(f"{where}: not JSON that can be read (too many brackets)") from None
        if not isinstance(found, dict):
            raise ValueError(f"{where}: expected a JSON object with a field {self.field!r}, got {text[:60]}")
        document = cast("dict[str, object]", found)
        if self.field not in document:
            there = ", ".join(sorted(document)) or "none"
            raise ValueError(f"{where}: there is no field {self.field!r}; the fields are {there}")
        return document


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
            done = 0
            for number in count(1):
                line = stream.readline(LONGEST_LINE + 1)
                if not line:
                    break
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"{path}:{number} is longer than {LONGEST_LINE >> 20} MB: every line is one document, "
                        "read at once; split it, or give text files"
                    )
                # The progress in a compressed file is its position there, not the length of the lines.
                now = raw.tell() if packed else done + len(line)
                yield number, line, now - done
                done = now
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); it cannot be unpacked, fetch it again") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
