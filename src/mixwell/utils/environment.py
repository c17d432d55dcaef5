"""What results were made with."""

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

from mixwell.utils import files

PACKAGES = ("mixwell", "torch", "numpy")
FILE = "environment.json"


def write(folder: Path) -> Path:
    """Write :func:`describe` beside results; commands that added to them before stay in the list.

    Args:
        folder: of the results; made if it is missing.

    Returns:
        The file.
    """
    made_with = describe()
    if (folder / FILE).exists():
        made_with["commands"] = list(dict.fromkeys(read(folder)["commands"] + made_with["commands"]))
    files.write(folder / FILE, json.dumps(made_with, indent=1) + "\n")
    return folder / FILE


def read(folder: Path) -> dict[str, Any]:
    """What :func:`write` wrote.

    Args:
        folder: of the results.

    Returns:
        The description.

    Raises:
        ValueError: it is not there, or not readable.
    """
    try:
        return json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / FILE} says what results were made with, but: {error}") from error


def describe(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, processor and command, as plain values. Of absolute paths only the last part is told.

    Args:
        command: the words of the command, by default those of this process.

    Returns:
        What to write beside results.
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
    """What ``torchrun`` calls the processes that it has started, through all restarts; ``None`` without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def packages() -> dict[str, str]:
    """Versions of the packages on which numbers depend.

    Returns:
        Versions by name; ``"unknown"`` of what is not installed.
    """
    return {name: _version(name) for name in PACKAGES}


def _program() -> list[str]:
    """The command line of mixwell, or a script of somebody's."""
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
    """What results were made with, as lines for a report.

    Args:
        folders: of the results.

    Returns:
        Names and values, each said once.
    """
    lines: list[tuple[str, str]] = []
    for made_with in map(read, folders):
        packages = ", ".join(f"{name} {version}" for name, version in made_with["packages"].items())
        processor = f"{made_with['processor']}, {made_with['cores']} cores, {made_with['system']}"
        lines += [("made by", command) for command in made_with["commands"]]
        lines += [("packages", f"Python {made_with['python']}, {packages}"), ("machine", processor)]
    return list(dict.fromkeys(lines))
