"""Tokenizers: bytes, files of the library ``tokenizers``, and training one."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from mixwell.data.sources.base import Source, digest_of
from mixwell.data.sources.text import good_cut
from mixwell.utils import files
from mixwell.utils.parsing import parse_json
from mixwell.utils.regular_files import expand_user, read_regular

END = "<|endoftext|>"
ENDS = (END, "</s>", "<eos>", "[SEP]")
"""Common names of the token between documents, in order of preference."""
LEAST_SIZE = 257
LARGEST_SIZE = 1 << 22
"""The library allocates a table of that size, and aborts the process where it cannot."""
_SEGMENT = 1 << 18
_PROBE = "The quick brown fox jumps over 12 lazy dogs."
_MOST_GROWTH = 100
_BATCH = 1 << 21
"""Characters that are encoded at once; each takes a few hundred bytes of memory meanwhile."""

Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(ABC):
    """Text to token ids and back."""

    size: int
    """The size of the vocabulary, including the end token."""
    end: int
    """The id of the token that follows every document."""
    identity: str
    """A digest of everything that determines the ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of two or four bytes, unsigned and little-endian, that holds all ids."""
        return np.dtype("<u2" if self.size <= 1 << 16 else "<u4")

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return an array of ids of :attr:`dtype` for each text, without end tokens."""

    @abstractmethod
    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """Return the text of ids below :attr:`size`, the end token as ``<|endoftext|>`` or its own name.

        Incomplete characters become replacement characters.
        """


@final
class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, and 256 for the end of a document.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode(["né"])[0].tolist(), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né<|endoftext|>')
    """

    size, end, identity = 257, 256, digest_of("bytes")

    @override
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    @override
    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        known = np.array(_checked(ids, self.size), dtype=np.int64)
        documents = np.split(known, np.flatnonzero(known == self.end))
        # All but the first begin with the end token of the one before.
        parts = [documents[0], *(document[1:] for document in documents[1:])]
        return END.join(bytes(part.tolist()).decode(errors="replace") for part in parts)


@final
class TokenizerFile(Tokenizer):
    """A tokenizer in a JSON file of the library ``tokenizers``.

    The name of a special token in a document, such as ``<|endoftext|>``, becomes that token.

    Args:
        path: the file, or a folder with ``tokenizer.json``.
        end: the name of the token between documents, by default the first of ``<|endoftext|>``, ``</s>``,
            ``<eos>``, ``[SEP]`` in the vocabulary.
    """

    def __init__(self, path: Path, *, end: str | None = None) -> None:
        library = _tokenizers()
        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = read_regular(self.path)
        except OSError as error:
            raise ValueError(f"cannot read the tokenizer {self.path}: {error.strerror or error}") from error
        try:
            _check_normalizer(library, parse_json(content))
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises no narrower class
            raise ValueError(
                f"{self.path} is not a tokenizer that the library tokenizers can load ({error}); give a "
                "tokenizer.json, or train one"
            ) from error
        # Files of published models may enable truncation or padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        named = [end] if end is not None else list(ENDS)
        self.end_name = next((name for name in named if name in vocabulary), "")
        if not self.end_name:
            raise ValueError(
                f"{self.path} has no token {' or '.join(named)} to put between documents; name the one it has"
            )
        self.end = vocabulary[self.end_name]
        self.size = max(vocabulary.values()) + 1
        self.identity = digest_of("file", hashlib.blake2b(content, digest_size=20).hexdigest(), self.end)

    @override
    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode without special tokens at the ends.

        Long texts are cut as :func:`good_cut` says. A tokenizer that adds a space before every text (Metaspace,
        ``add_prefix_space``) has one more token at each cut.
        """
        parts: list[list[Tokens]] = [[] for _ in texts]
        segments = ((owner, segment) for owner, text in enumerate(texts) for segment in _segments(text))
        waiting, characters = list[tuple[int, str]](), 0
        for owner, segment in segments:
            waiting.append((owner, segment))
            characters += len(segment)
            if characters >= _BATCH:
                self._encode(waiting, parts)
                waiting, characters = [], 0
        self._encode(waiting, parts)
        return [np.concatenate(part) if part else np.empty(0, self.dtype) for part in parts]

    @override
    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        return self._tokenizer.decode(_checked(ids, self.size), skip_special_tokens=False)

    def _encode(self, segments: Sequence[tuple[int, str]], parts: list[list[Tokens]]) -> None:
        batch = [segment for _, segment in segments]
        try:
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        except BaseException as error:
            # The library raises Exception, and for a pattern that takes too long a PanicException, which is none.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"{self.path} cannot encode the text ({error}); give another tokenizer"
            ) from error
        for (owner, _), encoding in zip(segments, encodings, strict=True):
            parts[owner].append(np.array(encoding.ids, dtype=self.dtype))


def load_tokenizer(spec: str | Path | None, base: Path, *, end: str | None = None) -> Tokenizer:
    """Return the tokenizer of a config.

    Args:
        spec: ``bytes`` or ``None`` for :class:`ByteTokenizer`, otherwise a file of the library ``tokenizers``.
        base: the folder that relative paths start from.
        end: the name of the token between documents, if it is not one of the common ones.
    """
    if spec is None or spec == "bytes":
        return ByteTokenizer()
    return TokenizerFile(base / expand_user(spec), end=end)


def train_tokenizer(
    sources: Sequence[Source],
    *,
    size: int,
    path: Path,
    progress: Callable[[int], None] | None = None,
) -> TokenizerFile:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016; as in GPT-2), and write it to a file.

    Args:
        size: of the vocabulary, including 256 bytes and the end token; it is smaller where the text has too few
            different words.
        progress: called with the number of bytes read so far.
    """
    if size < LEAST_SIZE:
        raise ValueError(
            f"a tokenizer needs at least {LEAST_SIZE} tokens (256 bytes and the end), got {size}"
        )
    if size > LARGEST_SIZE:
        raise ValueError(f"a tokenizer has at most {LARGEST_SIZE} tokens, got {size}")
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        done = 0
        for source in sources:
            known = source.size() is not None
            for piece in source.pieces():
                characters += len(piece.text)
                yield piece.text
                done += piece.read if known else len(piece.text)
                if progress is not None:
                    progress(done)

    tokenizer.train_from_iterator(texts(), trainer=trainer)
    if not characters:
        names = ", ".join(source.name for source in sources) or "no source"
        raise ValueError(f"there is no text to train a tokenizer on ({names}); add text")
    files.write_atomically(path, tokenizer.to_str(pretty=True))
    return TokenizerFile(path)


def _check_normalizer(library: Any, plain: Any) -> None:
    """Refuse normalizers that make a short text very long: a few replacements in a row can double it each."""
    steps: list[Any] = []

    def flatten(one: Any) -> None:
        if isinstance(one, dict) and isinstance(one.get("normalizers"), list):
            for part in one["normalizers"]:
                flatten(part)
        elif one is not None:
            steps.append(one)

    flatten(plain.get("normalizer") if isinstance(plain, dict) else None)
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    text = _PROBE
    for step in steps:
        one = library.Tokenizer.from_str(json.dumps({**empty, "normalizer": step}))
        text = one.normalizer.normalize_str(text)
        if len(text) > _MOST_GROWTH * len(_PROBE):
            raise ValueError(
                f"its normalizers make {len(_PROBE)} characters more than {_MOST_GROWTH} times as long"
            )


def _segments(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _SEGMENT:
        segment = text[start : start + _SEGMENT]
        segment = segment[: good_cut(segment)]
        yield segment
        start += len(segment)
    yield text[start:]


def _checked(ids: Iterable[int] | NDArray[Any], size: int) -> list[int]:
    known = [int(number) for number in ids]
    for place, number in enumerate(known):
        if not 0 <= number < size:
            raise ValueError(f"there is no token {number} (at {place}): the vocabulary has {size}")
    return known


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("tokenizers from files need tokenizers: pip install 'mixwell[data]'") from error
    return tokenizers
