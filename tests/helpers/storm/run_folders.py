"""Damaged and tampered run folders."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from helpers.commands import mixwell
from helpers.storm.cases import VALUES, Case, delete_at, mutated, paths_in, replace_at, small_config

KIND = "run folders"
STATE = "checkpoints/step-00000002/state.json"
READERS = {
    "mixture.json": ("export", "report", "resume"),
    "metrics.jsonl": ("report", "resume"),
    STATE: ("resume", "fidelity"),
    "config.yaml": ("resume", "report", "fidelity"),
    "environment.json": ("report", "resume"),
    "checkpoints/step-00000002/model.safetensors": ("resume",),
    "checkpoints/step-00000002/training.safetensors": ("resume",),
    "fidelity.json": ("report",),
}
ARGUMENTS: dict[str, list[str]] = {
    "export": ["export", "run", "--to", "megatron"],
    "report": ["report", "run"],
    "resume": ["resume", "run", "--no-report"],
    "fidelity": ["fidelity", "run", "--steps", "1", "--replicates", "0"],
}


def make_run(folder: Path) -> None:
    """Train a small run, of which the last checkpoint is then removed, so that it can be resumed."""
    small_config(folder)
    mixwell("run", "tiny.yaml", "--out", "run", "--no-report", cwd=folder)
    shutil.rmtree(folder / "run/checkpoints/step-00000004")
    (folder / "run/fidelity.json").write_text("[]")


def cases(seed: int, made: Path, *, values: int = 110, mutations: int = 30) -> list[Case]:
    """Return cases with wrong values in the files of a run, random changes, and what is no file.

    Args:
        made: the folder of :func:`make_run`.
    """
    found = _files(made)
    names = [
        "mixture.json",
        "mixture.json",
        "metrics.jsonl",
        "metrics.jsonl",
        STATE,
        STATE,
        STATE,
        "environment.json",
        "config.yaml",
    ]
    for number in range(values):
        own = random.Random(f"{KIND} {seed} {number}")
        name = own.choice(names)
        command = own.choice(READERS[name])
        found.append(
            _case(made, f"{command}, a value in {name} {number}", command, _changed(name, own.random()))
        )
    for number in range(mutations):
        own = random.Random(f"{KIND} bytes {seed} {number}")
        name = own.choice([one for one in READERS if one != "fidelity.json"])
        command = own.choice(READERS[name])
        found.append(_case(made, f"{command}, bytes of {name} {number}", command, _bytes(name, own.random())))
    return found


def _case(made: Path, name: str, command: str, change: Callable[[Path], None]) -> Case:
    def write(folder: Path) -> list[str]:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        config = folder / "run/config.yaml"
        # Paths refer to the folder in which the run was made.
        config.write_text(config.read_text().replace(str(made), str(folder)))
        change(folder / "run")
        return ARGUMENTS[command]

    return Case(KIND, name, write)


def _changed(name: str, state: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        own = random.Random(state)
        path = run / name
        text = path.read_text()
        if name.endswith(".jsonl"):
            lines = text.splitlines()
            line = own.randrange(len(lines))
            lines[line] = json.dumps(_one_changed(json.loads(lines[line]), own))
            path.write_text("\n".join(lines) + "\n")
        elif name.endswith(".yaml"):
            path.write_text(yaml.safe_dump(_one_changed(yaml.safe_load(text), own), sort_keys=False))
        else:
            path.write_text(json.dumps(_one_changed(json.loads(text), own)))

    return change


def _one_changed(plain: Any, own: random.Random) -> Any:
    value = own.choice([value for value in VALUES if not isinstance(value, dict) or 1 not in value])
    if own.random() < 0.08:
        return value
    path = own.choice(paths_in(plain))
    if path[-1] == "steps" and isinstance(value, int) and value > 100:
        value = -1  # as many steps as it asks for would be trained
    if own.random() < 0.25:
        delete_at(plain, path)
    else:
        replace_at(plain, path, value)
    return plain


def _bytes(name: str, state: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / name
        path.write_bytes(mutated(path.read_bytes(), random.Random(state)))

    return change


def _files(made: Path) -> list[Case]:
    contents: dict[str, bytes] = {
        "empty": b"", "null": b"null", "list": b"[]\n", "number": b"3\n", "object": b"{}\n", "not JSON": b"{", "nul": b"\0" * 10, "not UTF-8": b"\xff\n",
        "nested": b"[" * 100_000 + b"]" * 100_000 + b"\n", "nested object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n", "long number": b"9" * 5000 + b"\n", "long float": b"1e999999\n", "text": b'"a"\n',
    }  # fmt: skip
    found: list[Case] = []
    for name, commands in READERS.items():
        if name.endswith(".safetensors"):
            continue
        for command in commands:
            for what, content in contents.items():
                found.append(
                    _case(
                        made,
                        f"{command}, {name} is {what}",
                        command,
                        lambda run, name=name, content=content: (run / name).write_bytes(content) and None,
                    )
                )
    makers: dict[str, Callable[[Path], Any]] = {
        "a fifo": os.mkfifo,
        "a folder": os.mkdir,
        "a loop": lambda path: os.symlink(path.name, path),
        "/dev/zero": lambda path: os.symlink("/dev/zero", path),
        "absent": lambda path: None,
    }
    for name, commands in READERS.items():
        for what, make in makers.items():

            def change(run: Path, name: str = name, make: Callable[[Path], Any] = make) -> None:
                (run / name).unlink()
                make(run / name)

            found.append(_case(made, f"{commands[0]}, {name} is {what}", commands[0], change))
    return found
