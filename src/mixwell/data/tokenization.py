"""Arrays of tokens on disk: made once from text, compared with their checksums, and memory-mapped."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, final

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mixwell.data.sketches import TextSketches
from mixwell.data.sources.base import Piece, Source, digest_of
from mixwell.data.tokenizer import Tokenizer
from mixwell.utils import checksums, files
from mixwell.utils.checksums import DamagedError
from mixwell.utils.regular_files import regular_opener
from mixwell.utils.user_warnings import warn_user

FORMAT = 3
"""The version of the cached files; those of another version are made anew."""
GROUP_CHARACTERS = 8 << 20
RAW_TYPES = ("uint16", "uint32", "int32", "int64")
_CHUNK = 1 << 20
_CHECKED = (".bin", ".npz")
_FULL = (errno.ENOSPC, errno.EDQUOT)

Integers = NDArray[np.integer[Any]]
_verified: dict[Path, tuple[str, list[int]]] = {}
"""The checksums of files that this process has verified, and their stamps at that time."""


@final
@dataclass(frozen=True)
class TokenFile:
    """An array of tokens in a file.

    Args:
        path: ``.npy``, or raw numbers.
        tokens: the number of tokens, including end tokens.
        documents: the number of documents, if it is known.
        text_bytes: the length of the text in UTF-8, if it is known.
        sketches: the file with the sketches of the text's lines and passages, if there is one.
    """

    path: Path
    dtype: str
    tokens: int
    digest: str
    documents: int | None = None
    text_bytes: int | None = None
    sketches: Path | None = None

    def array(self) -> Integers:
        """Return the memory-mapped tokens, which cannot be written to."""
        if self.path.suffix == ".npy":
            return np.load(self.path, mmap_mode="r", allow_pickle=False)
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def tokenize(
    source: Source, tokenizer: Tokenizer, *, cache: Path, progress: Callable[[int], None] | None = None
) -> TokenFile:
    """Write a source's text as an array of tokens to the cache, or find the array there.

    Every document is followed by the end token; documents without text are left out. If another process makes
    the same array, wait for it. An array that does not fit its checksum is made again, with a warning; a process
    verifies a file once, unless it changes.

    Args:
        cache: the folder of arrays, found by the source's fingerprint and the tokenizer's identity.
        progress: called with the number of bytes of :meth:`mixwell.data.sources.base.Source.size` read so far, or
            of characters where the size is not known.
    """
    fingerprint = source.fingerprint(cache)
    key = digest_of(FORMAT, fingerprint, tokenizer.identity)
    folder = cache / "tokens"
    found = _find(folder, key, source.name)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with FileLock(folder / f"{key}.lock"):
            # Another process may have made it in the meantime.
            found = _find(folder, key, source.name)
            if found is None:
                _tokenize_to(folder / key, source, tokenizer, cache, fingerprint, progress)
                found = _find(folder, key, source.name)
    except OSError as error:
        if not _is_about(folder, error):
            raise
        raise ValueError(
            f"cannot write to the cache of tokens, {folder}: {error.strerror or error}; set MIXWELL_CACHE to a "
            "folder that can be written to and has room"
        ) from error
    assert found is not None, key
    return found


def open_tokens(path: Path, *, dtype: str | None = None, vocabulary: int) -> TokenFile:
    """Open an array of tokens that was made elsewhere; all of it is read once and validated.

    Args:
        path: ``.npy``, or raw numbers.
        dtype: the type of raw numbers: ``uint16``, ``uint32``, ``int32`` or ``int64``, little-endian.
        vocabulary: the number of different tokens; each must be below.
    """
    try:
        with open(path, "rb", opener=regular_opener):
            pass  # neither numpy nor a memory map refuses a pipe
        array = _memory_map(path, dtype)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: tokens must be whole numbers, got {array.dtype}; save them as uint16 or uint32"
        )
    if array.ndim != 1:
        raise ValueError(f"{path}: tokens must be in one row, got the shape {array.shape}; flatten them")
    if not len(array):
        raise ValueError(f"{path} has no tokens")
    content = hashlib.blake2b(array.dtype.str.encode(), digest_size=20)
    for start, chunk in chunks(array):
        content.update(np.ascontiguousarray(chunk).data)
        bad = (chunk < 0) | (chunk >= vocabulary)
        if bad.any():
            place = int(np.argmax(bad))
            raise ValueError(
                f"{path}: token {chunk[place]} at position {start + place} is not in the vocabulary of "
                f"{vocabulary}; check the tokenizer (and the dtype, if the file is raw)"
            )
    return TokenFile(path.absolute(), array.dtype.str, len(array), content.hexdigest())


def _memory_map(path: Path, dtype: str | None) -> Integers:
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, TokenError, SyntaxError, OverflowError, MemoryError) as error:
            # numpy parses the header as Python, and believes its length.
            raise ValueError(
                f"{path} is not an array of numbers ({error or 'damaged header'}); write it with numpy.save"
            ) from error
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path} is an archive of arrays; write one array with numpy.save")
        if dtype is not None and array.dtype != np.dtype(dtype):
            raise ValueError(
                f"{path} holds {array.dtype}, but dtype is {dtype}; leave dtype out for .npy files"
            )
        return array
    if dtype not in RAW_TYPES:
        raise ValueError(f"{path} is raw: its dtype must be one of {', '.join(RAW_TYPES)}, got {dtype}")
    kind, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if size % kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of the size of {dtype}; check the dtype"
        )
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)


def _tokenize_to(
    stem: Path,
    source: Source,
    tokenizer: Tokenizer,
    cache: Path,
    fingerprint: str,
    progress: Callable[[int], None] | None,
) -> None:
    sketches = TextSketches()
    with files.replacing(stem.with_suffix(".bin")) as temporary:
        with temporary.open("wb") as file:
            counts = _write_tokens(file, source, sketches.watch(source.pieces()), tokenizer, progress)
        if not counts["text_bytes"]:
            raise ValueError(
                f"domain {source.name} is empty: there is no text in it; add text, or leave it out"
            )
        if source.fingerprint(cache) != fingerprint:
            raise ValueError(f"{source.name} changed while it was read; start again when it is complete")
    sketches.save(stem.with_suffix(".npz"))
    made = {suffix: checksums.file_checksum(stem.with_suffix(suffix)) for suffix in _CHECKED}
    facts = {
        "format": FORMAT,
        "source": source.name,
        "dtype": tokenizer.dtype.str,
        **counts,
        "checksums": made,
    }
    files.write_atomically(stem.with_suffix(".json"), checksums.sealed(facts, indent=1))


def _is_about(folder: Path, error: OSError) -> bool:
    if error.errno in _FULL:
        return True
    place = Path(str(error.filename)) if error.filename is not None else None
    # Parents of the folder count too, since they may have to be made.
    return place is not None and (place.is_relative_to(folder) or folder.is_relative_to(place))


def _find(folder: Path, key: str, name: str) -> TokenFile | None:
    """Return the array of a key; ``None`` if there is none, or it is damaged, of which the user is warned."""
    array, sketches = folder / f"{key}.bin", folder / f"{key}.npz"
    if not (folder / f"{key}.json").exists():
        return None
    try:
        facts = checksums.read_sealed(folder / f"{key}.json")
        for suffix in _CHECKED:
            _verify(folder / f"{key}{suffix}", facts["checksums"][suffix])
    except (ValueError, KeyError, OSError) as error:
        warn_user(f"the cached tokens of {name} are damaged ({error}), so the text is tokenized again")
        return None
    return TokenFile(
        array, facts["dtype"], facts["tokens"], key, facts["documents"], facts["text_bytes"], sketches
    )


def _verify(path: Path, expected: str) -> None:
    """Compare a file with its checksum, unless this process has done so and the file has not changed since."""
    before = path.stat()
    known = (expected, files.stamp(before))
    if _verified.get(path) == known:
        return
    if checksums.file_checksum(path) != expected:
        raise DamagedError(f"the checksum of {path} is wrong")
    if files.settled(before):
        _verified[path] = known


def _write_tokens(
    file: BinaryIO,
    source: Source,
    pieces: Iterator[Piece],
    tokenizer: Tokenizer,
    progress: Callable[[int], None] | None,
) -> dict[str, int]:
    tokens = documents = text_bytes = done = 0
    known, begun = source.size() is not None, False
    end = np.array([tokenizer.end], tokenizer.dtype)
    for group in _groups(pieces):
        for piece, encoded in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
            text_bytes += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            begun = begun or bool(piece.text)
            file.write(encoded.data)
            tokens += len(encoded)
            if begun and piece.ends:
                file.write(end.data)
                tokens, documents, begun = tokens + 1, documents + 1, False
            done += piece.read if known else len(piece.text)
        if progress is not None:
            progress(done)
    assert not begun, f"the last piece of {source.name} does not end its document"
    return {"tokens": tokens, "documents": documents, "text_bytes": text_bytes}


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group, size = list[Piece](), 0
    for piece in pieces:
        group.append(piece)
        # An empty document takes memory too.
        size += len(piece.text) + 64
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _remove_leftovers(folder: Path) -> None:
    for part in folder.glob("*.part"):
        lock = FileLock(folder / f"{part.name.split('.')[0]}.lock", blocking=False)
        try:
            with lock:
                part.unlink(missing_ok=True)  # its process was killed
        except Timeout:
            continue


def chunks(array: Integers) -> Iterator[tuple[int, Integers]]:
    """Yield parts of an array, each with its position."""
    for start in range(0, len(array), _CHUNK):
        yield start, np.asarray(array[start : start + _CHUNK])
