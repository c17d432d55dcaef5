"""The command ``mixwell export``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mixwell.integrations.exporters.base import EXPORTERS, export, unknown_domain
from mixwell.training import mixture_file
from mixwell.utils import files
from mixwell.utils.parsing import parse_yaml
from mixwell.utils.regular_files import read_regular


def show_formats() -> None:
    """Print the formats, a line each."""
    width = max(map(len, EXPORTERS.names()))
    for name in EXPORTERS.names():
        print(f"{name:{width}}  {EXPORTERS.get(name).summary}")


def export_mixture(
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
        words: ``NAME=PATH``; they replace those of ``paths``.
        paths: YAML with ``name: path``.
        out: the file to write; ``None`` for standard output.
        force: whether to replace a file.
    """
    chosen = EXPORTERS.get(to)  # before any file is read: the shortest way to the message
    if out is not None and out.exists() and not force:
        raise ValueError(f"{out} is there already; remove it, give another --out, or --force")
    plain = mixture_file.read_mixture(mixture)
    domains: list[str] = plain["domains"]
    given = {**({} if paths is None else _read_paths(paths, domains)), **_parse_paths(words, domains)}
    text = export(
        mixture,
        to=to,
        weights=weights,
        paths=given,
        note=lambda line: print(f"mixwell: {line}", file=sys.stderr),
    )
    if out is None:
        print(text, end="")
    else:
        files.write_atomically(out, text)
        print(f"{out} is written ({chosen.summary})")


def _parse_paths(words: Sequence[str], domains: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        before, equals, after = word.partition("=")
        if not equals or not before or not after:
            raise ValueError(f"--path takes NAME=PATH, such as --path web=/data/web; got {word!r}")
        # The name of a domain may itself have an equals sign.
        name = max((one for one in domains if word.startswith(f"{one}=")), key=len, default=None)
        if name is None:
            raise ValueError(f"--path {word}: {unknown_domain(before, domains)}")
        path = word[len(name) + 1 :]
        if name in found:
            raise ValueError(f"--path was given twice for {name!r}: {found[name]!r} and {path!r}")
        found[name] = path
    return found


def _read_paths(file: Path, domains: Sequence[str]) -> dict[str, str]:
    try:
        plain = parse_yaml(read_regular(file).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the paths in {file} ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{file} must have a line `domain: path` for each domain, got {plain!r}")
    found = cast("dict[Any, Any]", plain)
    for name, path in found.items():
        if not isinstance(name, str) or not isinstance(path, str):
            raise ValueError(
                f"{file}: names and paths must be text, got {name!r}: {path!r}; put it into quotes"
            )
        if name not in domains:
            raise ValueError(f"{file}: {unknown_domain(name, domains)}")
    return found
