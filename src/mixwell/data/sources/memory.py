"""Documents in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast, final

from typing_extensions import override

from mixwell.data.sources.base import Piece, Source, check_text


@final
class Texts(Source):
    """Documents in memory.

    Example:
        >>> [piece.text for piece in Texts(["one", "two"]).pieces()]
        ['one', 'two']
    """

    def __init__(self, documents: Iterable[str], *, name: str = "texts") -> None:
        super().__init__(name)
        if isinstance(documents, str):
            raise ValueError(
                f"{name}: documents must be a list of strings, got one string; put it into a list"
            )
        self._documents = tuple(documents)
        whole = hashlib.blake2b(digest_size=20)
        self._size = 0
        for index, document in enumerate(cast("tuple[object, ...]", self._documents)):
            if document is None:
                raise ValueError(f"{name}, document {index}: documents must be strings, got None")
            content = check_text(document, f"{name}, document {index}", "text").encode()
            # The length distinguishes ["ab", "c"] from ["a", "bc"].
            whole.update(len(content).to_bytes(8, "little") + content)
            self._size += len(content)
        self._fingerprint = whole.hexdigest()

    @override
    def pieces(self) -> Iterator[Piece]:
        for document in self._documents:
            yield Piece(document, True, len(document.encode()))

    @override
    def fingerprint(self, cache: Path | None = None) -> str:
        return self._fingerprint

    @override
    def size(self) -> int | None:
        return self._size
