"""Files that a user names: regular files only, since reading a pipe or a device may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegularError(OSError):
    """A file is a pipe, a device or a folder."""


def regular_opener(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, or raise :class:`NotRegularError`; the ``opener`` of :func:`open`.

    The file is opened without waiting for a writer, and examined then, so that it cannot be replaced in between.
    """
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    message = f"it is {kind}, not a regular file; save its content to a file and name that"
    raise NotRegularError(None, message, str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; raise ``OSError`` where it is something else or cannot be read."""
    try:
        with open(path, "rb", opener=regular_opener) as file:
            return file.read()
    except ValueError as error:  # a NUL in the path
        raise OSError(None, str(error), str(path)) from error


def expand_user(path: str | Path) -> Path:
    """Return a path in which a leading ``~`` or ``~name`` is a home folder.

    Raises:
        ValueError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{str(path)[:80]!r} begins with the home folder of a user that this machine does not have; write "
            "the path out, or ./ before a name that begins with ~"
        ) from error
