"""The consumer's names of domains, as a user gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from mixwell.integrations.exporters.base import unknown


def gather(words: Sequence[str], file: Path | None, *, domains: Sequence[str]) -> dict[str, str]:
    """All of them together; those of the command line win.

    Args:
        words: ``NAME=PATH``.
        file: YAML with ``name: path``.
        domains: of the mixture.

    Returns:
        Paths by domain.
    """
    return {**({} if file is None else read(file, domains=domains)), **parse(words, domains=domains)}


def parse(words: Sequence[str], *, domains: Sequence[str]) -> dict[str, str]:
    """Words of the command line.

    Args:
        words: ``NAME=PATH``; a domain's name may itself have ``=``.
        domains: of the mixture.

    Returns:
        Paths by domain.

    Raises:
        ValueError: a word is of another form, or its domain is unknown or given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        before, equals, after = word.partition("=")
        if not equals or not before or not after:
            raise ValueError(f"--path takes NAME=PATH, such as --path web=/data/web; got {word!r}")
        name = max((one for one in domains if word.startswith(f"{one}=")), key=len, default=None)
        if name is None:
            raise ValueError(f"--path {word}: {unknown('domain', before, domains)}")
        if name in found:
            raise ValueError(
                f"--path was given twice for {name!r}: {found[name]!r} and {word[len(name) + 1 :]!r}"
            )
        found[name] = word[len(name) + 1 :]
    return found


def read(file: Path, *, domains: Sequence[str]) -> dict[str, str]:
    """A file of them.

    Args:
        file: YAML with ``name: path``.
        domains: of the mixture.

    Returns:
        Paths by domain.

    Raises:
        ValueError: the file is not of this form, or has an unknown domain.
    """
    try:
        plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the paths in {file} ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{file} must have a line `domain: path` for each domain, got {plain!r}")
    found = cast("dict[Any, Any]", plain)
    for name, path in found.items():
        if not isinstance(name, str) or not isinstance(path, str):
            raise ValueError(
                f"{file}: names and paths must be text, got {name!r}: {path!r}; put it into quotes"
            )
        if name not in domains:
            raise ValueError(f"{file}: {unknown('domain', name, domains)}")
    return found
