"""Atomic writes, deletion that follows no links, and a lock for folders of results."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

SETTLED_SECONDS = 2.0
"""A file changed more recently may change again without its time of change showing it."""


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
    remove_tree(path)
    path.mkdir(parents=True)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, as far as possible; of symbolic links only the link, never its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)  # which removes links inside, and does not follow them


def refuse_links_out(folder: Path, names: Iterable[str]) -> None:
    """Raise ``OSError`` if a file that a run would read, write or delete is a symbolic link out of its folder.

    Args:
        folder: may be reached through links itself.
        names: entries of the folder; everything below them is examined too.
    """
    inside = folder.resolve()
    for name in names:
        for path in _walk(folder / name):
            # Path.resolve raises RuntimeError where links lead to themselves.
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise OSError(
                    f"{path} is a symbolic link to {os.readlink(path)}, outside of {folder}: a run reads, writes "
                    "and deletes only in its own folder; replace the link by its target, or give another --out"
                )


def stamp(found: os.stat_result) -> list[int]:
    """Return what changes whenever a program writes to a file."""
    # A program can set the time of modification, but not the time of the last change of the inode.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def settled(found: os.stat_result) -> bool:
    """Return whether the next change of a file will change its stamp: times of change have steps."""
    return time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_SECONDS


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


def _walk(path: Path) -> Iterator[Path]:
    """Yield a path and everything below, without following links."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for parent, folders, names in os.walk(path):
            yield from (Path(parent, name) for name in (*folders, *names))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
