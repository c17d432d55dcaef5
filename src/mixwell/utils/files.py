"""Atomic writes, and a lock for folders of results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary file in the same folder, which replaces ``path`` at the end unless an error occurs.

    A reader finds the old content or the new, never a part of it. The folder must exist.
    """
    handle, name = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        flush(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def empty_folder(path: Path) -> None:
    """Make an empty folder, removing an existing one with its content."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Lock a folder of results, which other processes would overwrite; make it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(f"another run is at work in {folder}: wait for it, or give another --out") from error
    try:
        yield
    finally:
        # Removed while it is held, so that no other process holds the same file.
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
