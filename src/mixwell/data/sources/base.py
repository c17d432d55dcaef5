"""Where rows come from: documents of text, and the registry of config sections that load them."""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.utils.registry import Registry
from mixwell.utils.sections import ConfigSection

if TYPE_CHECKING:  # they read what is defined here
    from mixwell.data.datasets import IndexedDataset
    from mixwell.data.tokenizer import Tokenizer

Patterns = str | Path | Sequence[str | Path]
"""Files, folders or globs; see :func:`mixwell.data.sources.paths.expand`."""


@final
@dataclass(frozen=True)
class LoadContext:
    """The run that a source loads rows for.

    Args:
        key: of the config, for messages.
        base: the folder to which relative paths refer.
        tokenizer: for text.
        context: tokens of a row; ``None`` where the model takes no text.
        vocabulary: the number of tokens that the model knows, where that matters.
        announce: called with a line for the user.
        track: called with a name and a number of bytes, returns a function that is called with the bytes done.
    """

    key: str
    base: Path
    tokenizer: Tokenizer
    context: int | None
    vocabulary: int | None
    announce: Callable[[str], None]
    track: Callable[[str, int | None], Callable[[int], None]]

    @property
    def row_length(self) -> int:
        """The tokens of a row; an error where the model takes no text."""
        if self.context is None:
            raise ValueError(
                "this model takes no text; give tensors or python, another model, or, if yours does, set "
                "model.context"
            )
        return self.context


class SourceConfig(ConfigSection):
    """The section of a domain, of the validation set or of the test set; its first field is its name."""

    @abstractmethod
    def load(self, context: LoadContext) -> IndexedDataset:
        """Return the rows; raise ``ValueError`` where data are missing, empty or broken."""

    def documents(self, base: Path) -> Source | None:
        """Return the documents, or ``None`` where the rows are not text."""
        return None

    def location(self, base: Path) -> str | None:
        """Return the one path, pattern or name by which another tool finds the data; ``None`` if there is none."""
        return None


SOURCES = Registry[type[SourceConfig]]("data source", package="mixwell.data.sources")
"""Config sections by their key, such as ``files``."""


class TextSourceConfig(SourceConfig):
    """A source of text, which is tokenized into the cache or found there."""

    @override
    @abstractmethod
    def documents(self, base: Path) -> Source: ...

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        from mixwell.data import tokenization
        from mixwell.data.datasets import TokenRows
        from mixwell.data.downloads import cache_folder

        documents = self.documents(context.base)
        if documents.remote:
            context.announce(f"{context.key}: reading the dataset {documents.name}, which may download it")
        progress = context.track(context.key, documents.size())
        tokens = tokenization.tokenize(documents, context.tokenizer, cache=cache_folder(), progress=progress)
        return TokenRows(tokens, length=context.row_length)


@final
@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Args:
        text: the characters.
        ends: whether the document ends after them.
        read: the number of bytes of :meth:`Source.size` that were read for it.
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

    @property
    def remote(self) -> bool:
        """Whether reading it may download it."""
        return False

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the documents in their order, a few megabytes at a time."""

    @abstractmethod
    def fingerprint(self, cache: Path | None = None) -> str:
        """Return a hexadecimal digest of the text that :meth:`pieces` would yield, wherever it is stored.

        Args:
            cache: the folder in which digests of files are remembered, by default
                :func:`mixwell.data.downloads.cache_folder`.
        """

    @abstractmethod
    def size(self) -> int | None:
        """Return the number of bytes to be read, ``None`` where it is not known."""


class FileSource(Source):
    """Documents in files.

    Args:
        base: the folder that relative patterns start from.
        suffixes: in folders, only files with these suffixes.
    """

    def __init__(self, patterns: Patterns, *, base: Path, suffixes: Sequence[str] | None = None) -> None:
        several = [patterns] if isinstance(patterns, str | Path) else list(patterns)
        super().__init__(", ".join(map(str, several)))
        self.files = paths.expand(several, base=base, suffixes=suffixes)

    def settings(self) -> Mapping[str, object]:
        """Return the settings that the text depends on in addition to the files."""
        return {}

    @override
    def fingerprint(self, cache: Path | None = None) -> str:
        return digest_of(type(self).__name__, self.settings(), paths.digests(self.files, cache))

    @override
    def size(self) -> int | None:
        return sum(file.stat().st_size for file in self.files)


def digest_of(*values: object) -> str:
    """Return a hexadecimal digest of values that JSON can hold.

    Example:
        >>> digest_of("a", 1) == digest_of("a", 1), digest_of("a", 1) == digest_of("a", 2)
        (True, False)
    """
    content = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def document_pieces(
    documents: Iterable[tuple[object, str, int]], *, name: str, field: str, limit: int | None = None
) -> Iterator[Piece]:
    """Yield a piece for each document with text, and warn of those without.

    Args:
        documents: the value of the field, the place for messages, and the bytes that were read for it.
        limit: the greatest number of documents with text.
    """
    nulls = taken = 0
    for value, where, read in documents:
        if value is None:
            nulls += 1
            continue
        yield Piece(check_text(value, where, field), True, read)
        taken += 1
        if taken == limit:
            break
    if nulls:
        warnings.warn(f"{name}: {nulls} documents with nothing in {field!r} were left out", stacklevel=3)


def check_text(value: object, where: str, field: str) -> str:
    """Return the text of a field; refuse other values, and characters that no file can hold."""
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
                "fix or remove this document"
            ) from None
    return value
