"""Checksums of files that a later run trusts. A file that fails its checksum, or has none, is damaged.

There is one hash, BLAKE2b over blocks (:func:`file_checksum`), and a checksum is stored with what it covers:

- in a JSON object, as its last member, over all bytes before it (:func:`sealed`, :func:`read_sealed`);
- in a safetensors file, as a tensor of its own, over the file with zeros in that place (:func:`seal_safetensors`);
- for other files, in a sealed JSON object, by name (:func:`folder_checksums`, :func:`verify_files`).

So every flipped bit is found, also in the white space of JSON and in headers. Checksums find damage, not intent:
whoever can write a file can write the checksum that fits it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from mixwell.utils.parsing import parse_json
from mixwell.utils.regular_files import read_regular, regular_opener

BLOCK = 4 << 20
THREADS = min(8, os.cpu_count() or 1)
TENSOR = "checksum"
"""The name of the tensor that holds the checksum of a safetensors file."""
_SIZE = 32
_SEAL = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n\}\n')
_SEAL_LENGTH = len(b',\n "checksum": ""\n}\n') + 2 * _SIZE


class DamagedError(ValueError):
    """A file is missing, was cut off, or was changed after it was written."""


def file_checksum(path: Path, *, length: int | None = None, zeros: range = range(0)) -> str:
    """Return the checksum of a file, read in blocks of 4 MiB by up to 8 threads.

    ``BLAKE2b(BLAKE2b(block 1), BLAKE2b(block 2), ...)`` with digests of 32 bytes, in hexadecimal. ``hashlib``
    releases the interpreter's lock, so that the blocks are hashed in parallel.

    Args:
        length: cover only the first ``length`` bytes.
        zeros: bytes that count as zeros, whatever they are.

    Raises:
        DamagedError: the file is shorter than ``length``.
    """
    with open(path, "rb", opener=regular_opener) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if length is None else length
        if size < end:
            raise DamagedError(
                f"{path} is damaged: it has {size} bytes, fewer than the {end} that were written"
            )

        def digest(start: int) -> bytes:
            block = os.pread(file.fileno(), min(BLOCK, end - start), start)
            covered = range(max(zeros.start, start), min(zeros.stop, start + len(block)))
            if covered:
                block = block[: covered.start - start] + bytes(len(covered)) + block[covered.stop - start :]
            return hashlib.blake2b(block, digest_size=_SIZE).digest()

        starts = range(0, end, BLOCK)
        if len(starts) <= 1:
            return _root(map(digest, starts))
        with ThreadPoolExecutor(THREADS) as pool:
            return _root(pool.map(digest, starts))


class RunningChecksum:
    r"""The checksum of bytes as they are appended; equal to :func:`file_checksum` of a file with them.

    Example:
        >>> running = RunningChecksum()
        >>> running.update(b"a line\n")
        >>> len(running.hexdigest())
        64
    """

    def __init__(self) -> None:
        self._blocks = list[bytes]()
        self._rest = bytearray()

    def update(self, content: bytes) -> None:
        """Append bytes."""
        self._rest += content
        while len(self._rest) >= BLOCK:
            self._blocks.append(hashlib.blake2b(self._rest[:BLOCK], digest_size=_SIZE).digest())
            del self._rest[:BLOCK]

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""
        last = [hashlib.blake2b(self._rest, digest_size=_SIZE).digest()] if self._rest else []
        return _root([*self._blocks, *last])


def sealed(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return a JSON object with the checksum of the text before it as its last member ``checksum``.

    Example:
        >>> list(json.loads(sealed({"step": 3})))
        ['step', 'checksum']
    """
    assert content, "an empty object has no member that the checksum could follow"
    assert "checksum" not in content, "checksum is the member that is added"
    body = json.dumps(dict(content), indent=indent).removesuffix("}").rstrip("\n")
    return f'{body},\n "checksum": "{_digest(body.encode())}"\n}}\n'


def read_sealed(path: Path, *, version: int | None = None) -> dict[str, Any]:
    """Read a file with the text of :func:`sealed`, without the checksum.

    Args:
        version: of the format, in the member ``format``; another one is refused as such, not as damage.

    Raises:
        DamagedError: the file is missing, has no checksum, or does not fit it.
        ValueError: it has another format.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror or error})") from error
    body, seal = content[:-_SEAL_LENGTH], _SEAL.fullmatch(content[-_SEAL_LENGTH:])
    if seal is not None and seal[1].decode() != _digest(body):
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    found = _object(content)
    # Files of other versions may have no checksum, or one of another kind.
    other = None if found is None else found.get("format")
    if version is not None and type(other) is int and other != version:
        raise ValueError(f"{path} has format {other}, this version of mixwell reads format {version}")
    if seal is None or found is None:
        raise DamagedError(f"{path} is damaged: it has no checksum")
    del found["checksum"]
    return found


def seal_safetensors(path: Path) -> None:
    """Fill the tensor :data:`TENSOR` of a safetensors file, 32 zeros of uint8, with the file's checksum."""
    place = _checksum_place(path)
    checksum = file_checksum(path, zeros=place)
    with path.open("r+b") as file:
        file.seek(place.start)
        file.write(bytes.fromhex(checksum))


def verify_safetensors(path: Path) -> None:
    """Raise :class:`DamagedError` unless a safetensors file has its checksum and fits it."""
    try:
        place = _checksum_place(path)
        with open(path, "rb", opener=regular_opener) as file:
            expected = os.pread(file.fileno(), _SIZE, place.start).hex()
        right = file_checksum(path, zeros=place) == expected
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror or error})") from error
    if not right:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")


def folder_checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file in a folder and the folders below, by relative path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_checksum(path) for path in found}


def verify_files(folder: Path, expected: object) -> None:
    """Compare files with their checksums.

    Args:
        expected: the result of :func:`folder_checksums`, from a sealed file.

    Raises:
        DamagedError: a file is missing or was changed, or there are no checksums.
    """
    if not isinstance(expected, dict) or not expected:
        raise DamagedError(f"{folder} is damaged: it has no checksums of its files")
    for name, checksum in cast("dict[str, Any]", expected).items():
        try:
            found = file_checksum(folder / name)
        except OSError as error:
            raise DamagedError(f"{folder / name} cannot be read ({error.strerror or error})") from error
        if found != checksum:
            raise DamagedError(f"{folder / name} is damaged: its checksum is wrong")


def _root(digests: Any) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=_SIZE).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest()


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(content)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _checksum_place(path: Path) -> range:
    """Return where the checksum of a safetensors file is: 8 bytes, a JSON header of that length, the tensors."""
    with open(path, "rb", opener=regular_opener) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = _object(file.read(length)) if length <= size else None
    entry = None if header is None else header.get(TENSOR)
    if entry is None:
        raise DamagedError(f"{path} is damaged, or not a file of mixwell: it has no checksum")
    try:
        start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} is damaged: its header is not that of safetensors") from error
    if stop - start != _SIZE or not 8 + length <= start <= size - _SIZE:
        raise DamagedError(f"{path} is damaged: its checksum is out of place")
    return range(start, stop)
