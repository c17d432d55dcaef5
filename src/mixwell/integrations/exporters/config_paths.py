"""The paths of a run's data, from its config. Reading them needs no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel

from mixwell.data.sources.base import SOURCES, SourceConfig
from mixwell.utils.parsing import parse_yaml
from mixwell.utils.regular_files import read_regular
from mixwell.utils.sections import ByKey

FILE = "config.yaml"


class _Domains(BaseModel):
    """The keys of a run's config that say where its data are."""

    domains: dict[str, Annotated[SourceConfig, ByKey(SOURCES, short="files")]]
    base: Path


def data_paths(mixture: Path) -> dict[str, str]:
    """Return the location of each domain's data, where the run's config has exactly one for it.

    Domains with several locations, with rows from Python code, or with the location of another domain are left
    out, and so are all where the directory has no config that can be read: an export works without paths.

    Args:
        mixture: a run's directory, or the ``mixture.json`` in it.
    """
    file = (mixture if mixture.is_dir() else mixture.parent) / FILE
    try:
        plain: Any = parse_yaml(read_regular(file).decode("utf-8")) if file.is_file() else None
        config = _Domains.model_validate(plain)
    except (OSError, ValueError):  # ValidationError and UnicodeDecodeError are ValueErrors
        return {}
    located = {name: one.location(config.base) for name, one in config.domains.items()}
    times = Counter(located.values())
    return {name: path for name, path in located.items() if path is not None and times[path] == 1}
