"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary file beside a path, which takes its place at the end; left out if anything fails.

    A reader finds the old content or the new, never a part of it.

    Args:
        path: the file to be written; its folder must exist.

    Yields:
        The temporary file to write to.
    """
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("r+b") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp's own rights are for secrets
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, content: bytes | str) -> None:
    """Write a file whole; its folder is made if it is missing.

    Args:
        path: where to.
        content: the bytes, or text that is written as UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def empty_folder(path: Path) -> None:
    """Make a folder with nothing in it; what was in it is removed.

    Args:
        path: which.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def flush(path: Path) -> None:
    """Make sure that a file or a folder is on the disk.

    Args:
        path: which.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
