"""What `mixwell export` prints and writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mixwell.integrations import exporters
from mixwell.integrations.exporters import paths as named
from mixwell.training import mixture as mixtures
from mixwell.utils import files


def show_formats() -> None:
    """Print the formats, a line each."""
    width = max(map(len, exporters.FORMATS))
    for one in exporters.FORMATS.values():
        print(f"{one.name:{width}}  {one.summary}")


def export(
    mixture: Path,
    *,
    to: str,
    weights: str,
    words: Sequence[str],
    paths: Path | None,
    out: Path | None,
    force: bool,
) -> None:
    """Print a mixture in a format, or write it.

    Args:
        mixture: the file, or the directory of a run that has one.
        to: the format.
        weights: which of them.
        words: ``NAME=PATH``.
        paths: YAML with ``name: path``.
        out: the file to write; ``None`` for standard output.
        force: whether to replace a file.

    Raises:
        ValueError: what was given is wrong, or the file is there already.
    """
    exporters.find(to)  # before any file is read: the shortest way to the message
    if out is not None and out.exists() and not force:
        raise ValueError(f"{out} is there already; remove it, give another --out, or --force")
    plain = mixtures.read(mixture)
    given = named.gather(words, paths, domains=plain["domains"])
    exported = exporters.prepare(plain, to=to, weights=weights, paths=given)
    for note in exported.notes:
        print(f"mixwell: {note}", file=sys.stderr)
    if out is None:
        print(exported.text, end="")
    else:
        files.write_atomically(out, exported.text)
        print(f"{out} is written ({exporters.FORMATS[to].summary})")
