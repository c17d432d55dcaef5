"""What every source of text does."""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mixwell.data.sources import paths


@final
@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Args:
        text: the characters.
        ends: whether the document ends after them.
        read: how many bytes of :meth:`Source.size` were read for it.
    """

    text: str
    ends: bool
    read: int = 0


class Source(ABC):
    """Documents, read piece by piece.

    Args:
        name: for messages; may be set to the name of a domain.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """The documents in their order, a few megabytes at a time.

        Yields:
            Their pieces.
        """

    @abstractmethod
    def fingerprint(self, cache: Path | None = None) -> str:
        """A digest of the text that :meth:`pieces` would give, wherever it lies.

        Args:
            cache: the folder in which digests of files are remembered, by default
                :func:`mixwell.data.downloads.cache_folder`.

        Returns:
            Hexadecimal digits.
        """

    @abstractmethod
    def size(self) -> int | None:
        """How many bytes are to be read, if that is known."""


class FileSource(Source):
    """Documents in files.

    Args:
        patterns: files, folders or globs; see :func:`mixwell.data.sources.paths.expand`.
        base: the folder that relative patterns start from.
        suffixes: in folders, only files whose names end so.
    """

    def __init__(
        self,
        patterns: str | Path | Sequence[str | Path],
        *,
        base: Path,
        suffixes: Sequence[str] | None = None,
    ) -> None:
        several = [patterns] if isinstance(patterns, str | Path) else list(patterns)
        super().__init__(", ".join(str(pattern) for pattern in several))
        self.files = paths.expand(several, base=base, suffixes=suffixes)

    def settings(self) -> Mapping[str, object]:
        """What, besides the files, decides the text."""
        return {}

    def fingerprint(self, cache: Path | None = None) -> str:
        """A digest of the files' content, in their order, and of the settings.

        Args:
            cache: the folder in which digests of files are remembered.

        Returns:
            Hexadecimal digits.
        """
        return digest_of(type(self).__name__, self.settings(), paths.digests(self.files, cache))

    def size(self) -> int | None:
        """The files' bytes."""
        return sum(file.stat().st_size for file in self.files)


def digest_of(*values: object) -> str:
    """A digest of plain values.

    Args:
        values: anything that JSON can hold.

    Returns:
        Hexadecimal digits.

    Example:
        >>> digest_of("a", 1) == digest_of("a", 1), digest_of("a", 1) == digest_of("a", 2)
        (True, False)
    """
    content = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def checked_text(value: object, where: str, field: str) -> str | None:
    """A field's value, which must be text or nothing.

    Args:
        value: what was found.
        where: it was found, for messages.
        field: its name.

    Returns:
        The text; ``None`` where there is none.

    Raises:
        ValueError: it is something else, or has characters that no file can hold.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        shown = json.dumps(value, default=repr)
        kind = type(value).__name__
        raise ValueError(
            f"{where}: the field {field!r} is not text, got {kind} {shown[:60]}; name a field with text"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: the field {field!r} has half a character ({value[error.start]!a} at {error.start}); "
                "mend or remove this document"
            ) from None
    return value


def warn_of_nulls(count: int, name: str, field: str) -> None:
    """Say how many documents had no text, if any.

    Args:
        count: of documents.
        name: of the source.
        field: which was null.
    """
    if count:
        warnings.warn(f"{name}: {count} documents with nothing in {field!r} were left out", stacklevel=3)
