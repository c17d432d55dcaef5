"""Measures of the structure of the code, before and after a change: python bench/structure.py --compare FILE

Most measures come from `ast` and `tokenize`; the package is imported only for the two training steps that are run
and traced (`step_trace.py`, which uses public names only). A room is a top folder of the package.

    python bench/structure.py --json bench/results/structure-before.json
    python bench/structure.py --src ../other/src --compare bench/results/structure-before.json
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from step_trace import ROOT_ROOM, room, step_of_own_loop, step_of_run, traced_step

PACKAGE = "mixwell"
ROOT = Path(__file__).resolve().parents[1]

Value = int | str | list[int] | list[str]
Result = dict[str, dict[str, Value]]
Edges = dict[str, set[str]]
"""The modules that each module imports."""
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    # The files to edit for each of ten plausible changes cannot be found automatically. First what the review
    # counted by reading; then, once the restructured tree is there, the files that the change touches in it.
    "optimizer (Lion, Muon)": ("7", ("hypergradient/responses/x.py", "training/optimization.py")),
    "trace kind": ("12", ("hypergradient/traces/x.py",)),
    "CLI command": ("2-3", ("cli.py", "a command.py")),
    "data source": ("6", ("data/sources/x.py",)),
    "logger": ("8", ("integrations/loggers/x.py", "pyproject.toml")),
    "self-tuned step": ("2", ("simplex/updates/mirror_descent.py",)),
    "constraint": ("5", ("simplex/constraints.py", "training/constraints.py")),
    "method": ("1-2", ("methods/x.py",)),
    "report figure": ("5", ("report/run_figures.py", "report/runs.py")),
    "GradScaler": ("n/a", ("mixer/gradient_collector.py", "mixer/step.py", "integrations/*")),
}


# -------------------------------------------------------------------------------------------------- modules


@dataclass
class Module:
    """A source file, with what it imports: when it is imported itself, and at any time."""

    name: str
    path: str
    text: str
    tree: ast.Module
    early: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)


def read_modules(package: Path) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path.relative_to(package).as_posix(), text, ast.parse(text))
    for module in found.values():
        _read_imports(module, module.tree, found, early=True)
    return found


def _read_imports(module: Module, node: ast.AST, modules: Mapping[str, Module], *, early: bool) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            target = start + alias.name
            bound = target if start or alias.asname else target.split(".")[0]
            module.aliases[alias.asname or bound.rpartition(".")[2]] = bound
            known = target if target in modules else target.rpartition(".")[0]
            if known in modules and known != module.name:
                module.imported.add(known)
                if early:
                    module.early.add(known)
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        _read_imports(module, child, modules, early=early and not function and not typing_only)


# ----------------------------------------------------------------------------------------------------- size


def kinds_of_lines(text: str, tree: ast.Module) -> list[int]:
    """Lines in all, of code without imports, of imports, of docstrings, of comments, and blank ones."""
    code: set[int] = set()
    comments: set[int] = set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    strings = [one for one in ast.walk(tree) if isinstance(one, ast.Expr) and _text(one) is not None]
    imports = [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom)]
    docstrings, imported = _lines(strings), _lines(imports)
    total = len(text.splitlines())
    code -= docstrings | imported
    comments -= code | imported | docstrings
    blank = total - len(code) - len(imported) - len(docstrings) - len(comments)
    return [total, len(code), len(imported), len(docstrings), len(comments), blank]


def _text(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def sizes(modules: Mapping[str, Module]) -> dict[str, Value]:
    rooms: dict[str, list[int]] = defaultdict(lambda: [0] * 7)
    for module in modules.values():
        numbers = [1, *kinds_of_lines(module.text, module.tree)]
        for name in (room(module.path), "all"):
            rooms[name] = [a + b for a, b in zip(rooms[name], numbers, strict=True)]
    total = rooms.pop("all")
    found = {name: rooms[name] for name in sorted(rooms, key=lambda name: -rooms[name][1])}
    share = f"{100 * total[5] / (total[2] + total[3]):.1f} %"
    loose = sum(room(module.path) == ROOT_ROOM for module in modules.values())
    return {"modules at the root": loose, "comments per line of code": share, **found, "all": total}


# ---------------------------------------------------------------------------------------------- dependencies


def dependencies(modules: Mapping[str, Module]) -> dict[str, Value]:
    early: Edges = {name: module.early for name, module in modules.items()}
    all_times: Edges = {name: module.imported for name, module in modules.items()}
    fan_in = Counter(target for targets in early.values() for target in targets)
    hubs = sorted(modules, key=lambda name: -fan_in[name] * len(early[name]))[:10]
    found: dict[str, Value] = {
        "import edges, at import time": sum(map(len, early.values())),
        "import edges, lazy and typing-only too": sum(map(len, all_times.values())),
        "most imported": [f"{_short(name)} {count}" for name, count in _most_common(fan_in)[:5]],
    }
    for number, name in enumerate(hubs, 1):
        product = fan_in[name] * len(early[name])
        found[f"hub {number}, in x out"] = f"{product} = {fan_in[name]} x {len(early[name])}  {_short(name)}"
    for when, edges in (("at import time", early), ("lazy too", all_times)):
        for view, split in (("root one room", False), ("root modules rooms", True)):
            between: Edges = defaultdict(set)
            for name, targets in edges.items():
                if name != PACKAGE:  # the package's own __init__ re-exports from everywhere by design
                    own = room(modules[name].path, split=split)
                    between[own] |= {room(modules[target].path, split=split) for target in targets} - {own}
            found[f"cycles of rooms, {when} ({view})"] = [
                f"{len(one)} rooms: {' '.join(one)}" for one in cycles(between)
            ]
    return found


def cycles(edges: Edges) -> list[list[str]]:
    """The strongly connected components of more than one room."""
    reached = {name: set(targets) for name, targets in edges.items()}
    for middle in reached:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    groups = {tuple(sorted(b for b in reached if b in reached[a] and a in reached[b])) for a in reached}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _most_common(counted: Counter[str]) -> list[tuple[str, int]]:
    """By count, then by name, so that two measurements of a tree are equal."""
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))


def _short(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


# ----------------------------------------------------------------------------------------- names, docstrings


@dataclass(frozen=True)
class Classes:
    """The classes of the package by full name, each with the module that defines it."""

    modules: Mapping[str, Module]
    known: dict[str, tuple[Module, ast.ClassDef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self.known[f"{module.name}.{node.name}"] = (module, node)

    def ancestors(self, name: str) -> Iterator[str]:
        module, node = self.known[name]
        for base in node.bases:
            written = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self._find(module, written)
            if found is not None and found != name:
                yield found
                yield from self.ancestors(found)

    def _find(self, module: Module, written: str) -> str | None:
        """Follow imports and re-exports from a name in a module to the class."""
        head, dot, rest = written.partition(".")
        full = module.aliases.get(head, f"{module.name}.{head}") + dot + rest
        if full in self.known:
            return full
        place, _, last = full.rpartition(".")
        elsewhere = self.modules.get(place)
        return self._find(elsewhere, last) if elsewhere and last in elsewhere.aliases else None

    def methods(self, name: str) -> list[ast.FunctionDef]:
        return [one for one in self.known[name][1].body if isinstance(one, ast.FunctionDef)]

    def public(self, name: str) -> list[str]:
        """Public methods, properties and attributes, with those of base classes in the package."""
        found: set[str] = set()
        for one in (name, *self.ancestors(name)):
            found |= {method.name for method in self.methods(one)}
            for node in ast.walk(self.known[one][1]):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found |= {node.attr} if ast.unparse(node.value) == "self" else set()
            for node in self.known[one][1].body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        return sorted(member for member in found if not member.startswith("_"))


def names(modules: Mapping[str, Module], classes: Classes) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for wanted in ("Signal", "Mixer"):
        for name in (name for name in classes.known if name.endswith(f".{wanted}")):
            members = classes.public(name)
            found[f"members of {wanted}"], found[f"{wanted}'s members"] = len(members), members
    twice = Counter(name.rpartition(".")[2] for name in classes.known)
    functions = Counter(
        name
        for module in modules.values()
        for name in {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef)}
    )
    repeated = [(name, count) for name, count in _most_common(functions) if count > 2]
    public = [f"{name} {count}" for name, count in repeated if not name.startswith("_")]
    private = [f"{name} {count}" for name, count in repeated if name.startswith("_")]
    return found | {
        "class names defined twice": sorted(name for name, count in twice.items() if count > 1),
        "functions in 3 or more modules, public": public,
        "functions in 3 or more modules, private": private,
    }


def docstrings(modules: Mapping[str, Module], classes: Classes) -> dict[str, Value]:
    echoed: list[ast.FunctionDef] = []
    for name in classes.known:
        inherited = {method.name for base in classes.ancestors(name) for method in classes.methods(base)}
        echoed += [one for one in classes.methods(name) if one.name in inherited and ast.get_docstring(one)]
    nodes = [node for module in modules.values() for node in ast.walk(module.tree)]
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, Documented)]
    entries = [entry for text in texts for entry in args_entries(text)]
    return {
        "overriding methods with a docstring": len(echoed),
        "lines of their docstrings": sum(len(_lines(one.body[:1])) for one in echoed),
        "Args entries": len(entries),
        "Args entries of at most four words": sum(len(entry.split()) <= 4 for entry in entries),
        "lines that say 'not used'": sum("not used" in line for text in texts for line in text.splitlines()),
    }


def args_entries(docstring: str) -> list[str]:
    """What the Args section says of each argument."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    found = re.split(r"^ {4}(?=\S)", section[1], flags=re.MULTILINE)[1:] if section else []
    return [entry.partition(":")[2] for entry in found]


# -------------------------------------------------------------------------------------------------- the rest


def tests_by_folder(src: Path) -> dict[str, Value]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(src)}
    done = subprocess.run(command, cwd=src.parent, env=environment, capture_output=True, text=True)
    files = [Path(line.partition("::")[0]) for line in done.stdout.splitlines() if "::" in line]
    counted = Counter("doctests" if file.parts[0] == "src" else file.parent.as_posix() for file in files)
    problem: dict[str, Value] = {"problem": f"pytest ended with {done.returncode}"} if done.returncode else {}
    return {**dict(sorted(counted.items())), "all": sum(counted.values()), **problem}


def measure(src: Path) -> Result:
    package = src / PACKAGE
    modules = read_modules(package)
    classes = Classes(modules)
    sys.path.insert(0, str(src))
    git = ["git", "-C", str(src), "log", "-1", "--format=%h", "--", "."]  # the last that changed the sources
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    changes: dict[str, Value] = {
        name: [file if _exists(package, file) else f"{file} (renamed?)" for file in after] or f"{n} (review)"
        for name, (n, after) in CHANGES.items()
    }
    columns = ["files", "lines", "code", "imports", "docs", "comments", "blank"]
    return {
        "tree": {"commit": commit or "unknown", "python": sys.version.split()[0]},
        "size (" + ", ".join(columns) + ")": sizes(modules),
        "one step of `mixwell run`": traced_step(package, step_of_run),
        "one step of mixer.batch": traced_step(package, step_of_own_loop),
        "dependencies": dependencies(modules),
        "names": names(modules, classes),
        "docstrings": docstrings(modules, classes),
        "tests": tests_by_folder(src),
        "files to edit for a change": changes,
    }


def _exists(package: Path, file: str) -> bool:
    """Return whether a file of :data:`CHANGES` is there; a new one, ``x.py``, needs its folder."""
    path = package / file
    return "/" not in file or (path.parent.is_dir() and (path.stem in ("x", "*") or path.exists()))


def shown(value: Value | None, width: int) -> str:
    if isinstance(value, list):
        numbers = all(isinstance(one, int) for one in value)
        value = "".join(f"{one:>7}" for one in value) if value and numbers else _counted(value)
    text = "-" if value is None else str(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _counted(value: list[Any]) -> str:
    return f"{len(value)}: {', '.join(value)}" if value else "0"


def show(results: Iterable[Result], *, width: int = 56) -> None:
    """An aligned table with a column for each result; long lists of names are cut, the JSON has them whole."""
    columns = list(results)
    for section in dict.fromkeys(section for result in columns for section in result):
        parts = [result.get(section, {}) for result in columns]
        print(f"\n{section}")
        for name in dict.fromkeys(name for part in parts for name in part):
            cells = "  ".join(f"{shown(part.get(name), width):{width}}" for part in parts)
            print(f"  {name:54}{cells}".rstrip())


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="the folder that has the package")
    parser.add_argument("--json", type=Path, help="where to write the measures")
    parser.add_argument("--compare", type=Path, help="measures of another tree, to print on the left")
    options = parser.parse_args()
    result = measure(options.src.resolve())
    show([json.loads(options.compare.read_text()), result] if options.compare else [result])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
