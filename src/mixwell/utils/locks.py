"""One process at a time in a folder of results."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def only_one(folder: Path) -> Generator[None]:
    """Keep other processes out of a folder of results, which they would overwrite.

    Args:
        folder: made if it is missing.

    Raises:
        OSError: another one is at work in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise OSError(f"another run is at work in {folder}: wait for it, or give another --out") from error
    try:
        yield
    finally:
        (folder / ".lock").unlink(
            missing_ok=True
        )  # while it is held, so that nobody else holds the same file
        lock.release()
