"""The environment of results: versions, machine and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mixwell.utils import files
from mixwell.utils.parsing import parse_json, shown
from mixwell.utils.regular_files import read_regular

PACKAGES = ("mixwell", "torch", "numpy")
FILE = "environment.json"


class _Fields(BaseModel):
    """The fields of a description, which may have been edited."""

    commands: list[str]
    python: str
    packages: dict[str, str]
    system: str
    processor: str
    cores: int | None
    job: str | None = None


def write(folder: Path) -> Path:
    """Write :func:`describe` to a folder of results and return the file; commands of earlier calls stay listed."""
    made_with = describe()
    if (folder / FILE).exists():
        made_with["commands"] = list(dict.fromkeys(read(folder)["commands"] + made_with["commands"]))
    files.write_atomically(folder / FILE, json.dumps(made_with, indent=1) + "\n")
    return folder / FILE


def read(folder: Path) -> dict[str, Any]:
    """Return the description in a folder of results; raise ``ValueError`` where it cannot be read."""
    try:
        found = parse_json(read_regular(folder / FILE))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the environment of the results in {folder}: {error}") from error
    try:
        _Fields.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(
            f"{folder / FILE} is not the description of an environment ({where}: {first['msg']}, got "
            f"{shown(first['input'])}); was it edited?"
        ) from error
    return found


def describe(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Describe versions, processor and command (by default of this process) as plain values.

    Absolute paths are reduced to their last part.
    """
    words = list(command if command is not None else [*_program(), *sys.argv[1:]])
    started = {} if job() is None else {"job": job()}
    return {
        "commands": [shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)],
        "python": platform.python_version(),
        "packages": packages(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        **started,
    }


def job() -> str | None:
    """Return the run id of ``torchrun``, the same through all restarts; ``None`` without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def packages() -> dict[str, str]:
    """Return the versions of the packages that numbers depend on; ``"unknown"`` where one is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _program() -> list[str]:
    script = Path(sys.argv[0])
    return ["python", str(script)] if script.suffix == ".py" and script.name != "__main__.py" else ["mixwell"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def facts(folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the environments of results as lines of names and values for a report, without duplicates."""
    lines: list[tuple[str, str]] = []
    for made_with in map(read, folders):
        packages = ", ".join(f"{name} {version}" for name, version in made_with["packages"].items())
        processor = f"{made_with['processor']}, {made_with['cores']} cores, {made_with['system']}"
        lines += [("made by", command) for command in made_with["commands"]]
        lines += [("packages", f"Python {made_with['python']}, {packages}"), ("machine", processor)]
    return list(dict.fromkeys(lines))
