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

from mixwell import files

PACKAGES = ("mixwell", "torch", "numpy")
FILE = "environment.json"


def write(folder: Path) -> Path:
    """Write :func:`describe` beside results.

    Args:
        folder: of the results; made if it is missing.

    Returns:
        The file.
    """
    files.write(folder / FILE, json.dumps(describe(), indent=1) + "\n")
    return folder / FILE


def describe(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, processor and command, as plain values. No path of the machine is in it.

    Args:
        command: the words of the command, by default those of this process.

    Returns:
        What to write beside results.
    """
    words = list(command if command is not None else ["mixwell", *sys.argv[1:]])
    return {
        "command": shlex.join(words),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


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


def facts(described: dict[str, Any]) -> list[tuple[str, str]]:
    """What :func:`describe` gave, as lines for a report.

    Args:
        described: read back from a file.

    Returns:
        Names and values, without the command.
    """
    packages = ", ".join(f"{name} {version}" for name, version in described["packages"].items())
    processor = f"{described['processor']}, {described['cores']} cores, {described['system']}"
    return [("packages", f"Python {described['python']}, {packages}"), ("machine", processor)]
