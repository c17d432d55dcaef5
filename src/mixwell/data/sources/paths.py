"""The files that match patterns, and cached digests of files."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mixwell.data.downloads import cache_folder
from mixwell.utils import checksums, files
from mixwell.utils.regular_files import expand_user


def expand(
    patterns: Sequence[str | Path], *, base: Path, suffixes: Sequence[str] | None = None
) -> list[Path]:
    """Return the files that match patterns: absolute paths, sorted, each file once.

    A pattern is a file, a folder (with its files and folders, hidden ones left out), or a glob, in which ``**``
    matches any folders. ``~`` is the home folder.

    Args:
        base: the folder that relative patterns start from.
        suffixes: in folders, only files with these suffixes.
    """
    if not patterns:
        raise ValueError("no file was given; name a file, a folder or a glob such as 'data/*.txt'")
    found: dict[str, Path] = {}
    for pattern in patterns:
        for path in _matches(str(pattern), expand_user(base).absolute(), suffixes):
            found.setdefault(os.path.realpath(path), path)
    return sorted(found.values(), key=lambda path: path.parts)


def single_location(patterns: str | Sequence[str], base: Path) -> str | None:
    """Return the absolute path of the only pattern, which need not match anything; ``None`` for several."""
    several = [patterns] if isinstance(patterns, str) else patterns
    return os.path.abspath(base / os.path.expanduser(several[0])) if len(several) == 1 else None


def digests(paths: Iterable[Path], cache: Path | None = None) -> list[str]:
    """Return the digest of each file's content, in hexadecimal digits.

    They are remembered by the file's absolute path, size and times of change, so that large files are read once. A
    file that was rewritten is read again even where its size and time of modification are as before (``cp -p``).

    Args:
        cache: the folder in which digests are remembered, by default the cache folder.
    """
    memos: dict[Path, _Memo] = {}
    where = (cache or cache_folder()) / "digests"
    answer: list[str] = []
    try:
        for path in paths:
            absolute = Path(os.path.abspath(path))
            if absolute.parent not in memos:
                memos[absolute.parent] = _Memo(where, absolute.parent)
            try:
                answer.append(memos[absolute.parent].digest(absolute))
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        for memo in memos.values():
            memo.save()
    return answer


def _matches(pattern: str, base: Path, suffixes: Sequence[str] | None) -> list[Path]:
    path = Path(os.path.abspath(base / expand_user(pattern)))
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = _files_in(path)
        matching = [file for file in inside if suffixes is None or file.name.endswith(tuple(suffixes))]
        if not matching:
            kinds = "" if suffixes is None else f" that ends in {' or '.join(suffixes)}"
            others = f" (it has {len(inside)} others)" if inside else ""
            raise ValueError(
                f"the folder {path} has no file{kinds}{others}; add files, or name another folder"
            )
        return matching
    if path.exists():
        raise ValueError(f"{path} is neither a file nor a folder; name regular files")
    if not glob.has_magic(pattern):
        raise ValueError(
            f"there is no file or folder {pattern!r} in {base}; check the spelling (relative paths start there)"
        )
    names = glob.glob(str(expand_user(pattern)), root_dir=base, recursive=True)
    matching = [file for name in names if (file := Path(os.path.abspath(base / name))).is_file()]
    if not matching:
        raise ValueError(
            f"no file matches {pattern!r} in {base}; check the pattern (relative ones start "
            "there, ** stands for any folders)"
        )
    return matching


def _files_in(folder: Path) -> list[Path]:
    inside: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside += [
            path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()
        ]
    return inside


class _Memo:
    """The digests of the files of one folder."""

    def __init__(self, where: Path, folder: Path) -> None:
        name = hashlib.blake2b(str(folder).encode(errors="surrogateescape"), digest_size=20).hexdigest()
        self.path = where / f"{name}.json"
        self.changed = False
        self.known: dict[str, Any] = {}
        try:
            self.known = checksums.read_sealed(self.path)["files"]
        except (ValueError, KeyError):
            return  # without it files are read again

    def digest(self, path: Path) -> str:
        before = path.stat()
        stamp = files.stamp(before)
        known = self.known.get(path.name)
        if isinstance(known, list) and known[:-1] == stamp and isinstance(known[-1], str):
            return known[-1]
        with path.open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20))
        if files.stamp(path.stat()) != stamp:
            raise ValueError(f"{path} changed while it was read; start again when it is complete")
        if files.settled(before):
            self.known[path.name] = [*stamp, content.hexdigest()]
            self.changed = True
        return content.hexdigest()

    def save(self) -> None:
        if not self.changed:
            return
        try:
            files.write_atomically(self.path, checksums.sealed({"files": self.known}))
        except OSError:
            return  # a cache that cannot be written is slow, not wrong
