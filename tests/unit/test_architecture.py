"""Imports point up the table of rooms, and nothing else stands at the root of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import mixwell

PACKAGE = Path(mixwell.__file__).parent
# From the bottom up: a room may import those before it.
ROOMS = (
    "typing",
    "utils",
    "simplex",
    "distributed",
    "hypergradient",
    "signals",
    "mixer",
    "reference",
    "data",
    "methods",
    "training",
    "integrations",
    "lab",
    "report",
    "cli",
)
ROOT_MODULES = {"__init__", "__main__", "_version", "typing", "cli"}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> set[str]:
    """The rooms that a module imports, at the top, lazily or for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("mixwell.")}
    return found & set(ROOMS)


def test_folders_import_only_those_above() -> None:
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        room = _module(path).split(".")[0]
        if room in ROOMS:
            later = ROOMS[ROOMS.index(room) + 1 :]
            found |= {(_module(path), other) for other in _imported(path) & set(later)}
    assert sorted(found) == []


def test_every_folder_is_listed_and_documented() -> None:
    folders = {one.name for one in PACKAGE.iterdir() if one.is_dir() and one.name != "__pycache__"}
    assert folders == set(ROOMS) - {"typing", "cli"}
    for room in folders:
        assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())), room


def test_package_root_has_no_other_modules() -> None:
    assert {one.stem for one in PACKAGE.glob("*.py")} == ROOT_MODULES
