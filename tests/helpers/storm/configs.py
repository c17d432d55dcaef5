"""Malformed config files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from helpers.storm.cases import HUGE, VALUES, Case, mutated, paths_in, plain_config, replace_at, small_config
from mixwell.training import config_io

KIND = "configs"
SIZES = (
    "model.layers",
    "model.width",
    "model.context",
    "model.heads",
    "batch.rows",
    "mixer.sketch_size",
    "mixer.projection_rank",
)
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


def cases(seed: int, *, values: int = 200, mutations: int = 60) -> list[Case]:
    """Return cases with wrong values of settings, with files that are no configs, and with random changes."""
    chance = random.Random(f"{KIND} {seed}")
    found = [*_sizes(), *_files()]
    for number in range(values):
        found.append(_value_case(random.Random(f"{KIND} value {seed} {number}"), chance))
    for number in range(mutations):
        found.append(_mutation_case(number, random.Random(f"{KIND} mutation {seed} {number}")))
    return found


def _sizes() -> list[Case]:
    found: list[Case] = []
    for key in SIZES:
        for size in (10**5, 10**7, 10**12, HUGE):
            for command in ("plan", "run"):
                found.append(_with(f"{command} {key}={size:.0e}", command, [f"{key}={size}", *_needed(key)]))
    for setting in ("optimizer.lr=1e300", "optimizer.lr=1e30", "optimizer.weight_decay=1e300", "mixer.curvature=1e300",
                    "mixer.step_size=1e300", "optimizer.clip_norm=1e-320", "optimizer.lr=1e-320", "seed=9223372036854775807"):  # fmt: skip
        for command in ("plan", "run"):
            found.append(_with(f"{command} {setting}", command, [setting.replace("=1e", "=1.0e")]))
    for setting in (
        "steps=1e30",
        f"steps={HUGE}",
        f"steps={10**12}",
        f"output.keep={HUGE}",
        f"mixer.warmup={HUGE}",
    ):
        found.append(_with(f"plan {setting}", "plan", [setting]))
    return found


def _needed(key: str) -> list[str]:
    return ["mixer.traces=sketched"] if key == "mixer.sketch_size" else []


def _with(name: str, command: str, settings: Sequence[str]) -> Case:
    def write(folder: Path) -> list[str]:
        small_config(folder)
        options = [part for setting in settings for part in ("--set", setting)]
        return [command, "tiny.yaml", *options, *(["--no-report"] if command == "run" else [])]

    return Case(KIND, name, write)


def _value_case(own: random.Random, chance: random.Random) -> Case:
    place, value = own.random(), own.choice(VALUES)
    suffix = own.choice([".yaml", ".yaml", ".json"])
    command = own.choice(["plan", "run"])

    def write(folder: Path) -> list[str]:
        plain_config(folder)
        whole = config_io.read_config(folder / "tiny.yaml").model_dump(mode="json")
        paths = paths_in(whole)
        path = paths[int(place * len(paths))]
        replace_at(whole, path, value)
        # As many steps as a user asks for are not a mistake, but they take a while.
        many = path == ("steps",) and isinstance(value, int) and value > 100
        (folder / f"odd{suffix}").write_text(
            yaml.safe_dump(whole, sort_keys=False) if suffix == ".yaml" else json.dumps(whole)
        )
        chosen = "plan" if many else command
        return [chosen, f"odd{suffix}", *(["--no-report"] if chosen == "run" else [])]

    return Case(KIND, f"{command}, value {place:.3f} is {str(value)[:20]!r}, {suffix}", write)


def _mutation_case(number: int, own: random.Random) -> Case:
    state = own.random()

    def write(folder: Path) -> list[str]:
        path = small_config(folder)
        path.write_bytes(mutated(path.read_bytes(), random.Random(state)))
        return ["plan", "tiny.yaml", "--set", "steps=4"]

    return Case(KIND, f"bytes {number}", write)


def _files() -> list[Case]:
    depth = 100_000
    texts: dict[str, str | bytes] = {
        "billion laughs.yaml": LAUGHS,
        "laughs in domains.yaml": LAUGHS + "domains: *a8\n",
        "merged laughs.yaml": "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], y{n}: *a{n - 1}}}\n" for n in range(1, 9)),
        "alias to itself.yaml": "domains: &a\n  x: *a\n",
        "nested lists.yaml": "domains: " + "[" * depth,
        "nested closed lists.yaml": "domains: " + "[" * 5000 + "]" * 5000,
        "nested maps.yaml": "domains: " + "{a: " * 5000 + "1" + "}" * 5000,
        "nested blocks.yaml": "".join(" " * n + f"k{n}:\n" for n in range(2000)),
        "nested dashes.yaml": "domains: \n" + "- " * 5000 + "1",
        "nested lists.toml": "a = " + "[" * 5000 + "]" * 5000,
        "nested tables.toml": "[" + ".".join(["a"] * 5000) + "]\nb = 1\n",
        "nested inline.toml": "a = " + "{b = " * 5000 + "1" + "}" * 5000,
        "nested lists.json": '{"domains": ' + "[" * depth + "]" * depth + "}",
        "arguments.yaml": "domains: {a: {python: 'm:f', arguments: " + "{a: " * 400 + "1" + "}" * 400 + "}}",
        "long number.yaml": "domains: {a: a.txt}\nsteps: " + "9" * 5000,
        "long number.toml": "steps = " + "9" * 5000,
        "sexagesimal.yaml": "steps: 1" + ":59" * 20000,
        "utf-16.yaml": "domains: {a: a.txt}".encode("utf-16"),
        "latin-1.yaml": "domains: {é: a.txt}".encode("latin-1"),
        "mark.yaml": b"\xef\xbb\xbfdomains: {a: nothing.txt}",
        "mark.toml": b"\xef\xbb\xbfsteps = 3",
        "nul.yaml": b"domains: \0",
        "surrogate.yaml": b"domains: \xed\xa0\x80",
        "escaped surrogate.yaml": 'domains: {a: "\\ud800"}',
        "escaped nul.yaml": 'domains: {a: "a\\0b"}\nvalidation: "a\\0b"',
        "empty.yaml": "", "spaces.yaml": "  \n\n", "comment.yaml": "# nothing", "list.yaml": "- 1", "number.yaml": "3", "null.yaml": "null",
        "text.yaml": "domains", "documents.yaml": "a: 1\n---\nb: 2", "tabs.yaml": "domains:\n\ta: b", "tag.yaml": "domains: !!python/object:os.system x",
        "set.yaml": "domains: !!set {a, b}", "pairs.yaml": "domains: !!pairs [a: b]", "binary.yaml": "domains: !!binary gICA", "date.yaml": "seed: 2020-01-01",
        "bad date.yaml": "seed: 2020-13-41", "bad time.yaml": "seed: 2020-01-01 99:99:99", "bad int.yaml": "seed: !!int x", "bad float.yaml": "seed: !!float x", "bad binary.yaml": "domains: !!binary é",
        "list key.yaml": "? [a]\n: 1", "number key.yaml": "domains: {1: a.txt}\n2: 3", "null key.yaml": "null: 1\ndomains: {~: x}", "twice.yaml": "steps: 1\nsteps: 2",
        "bad.toml": "steps = ", "yaml.toml": "domains: {a: b}", "date.toml": "seed = 2020-01-01T00:00:00Z", "base.yaml": "base: 3\ndomains: {a: b}",
        "base nobody.yaml": "base: ~nobody\ndomains: {a: b}", "base nobody path.yaml": "base: ~no_such_user/x\ndomains: {a: b}", "base nul.yaml": 'base: "a\\0b"\ndomains: {a: b}',
        "many domains.yaml": "domains: {" + ", ".join(f"d{n}: a.txt" for n in range(3000)) + "}\nvalidation: b.txt",
        "long name.yaml": "domains: {" + "a" * 100_000 + ": a.txt}\nvalidation: b.txt", "long path.yaml": "domains: {a: " + "a" * 100_000 + "}\nvalidation: b.txt",
        "long unknown.yaml": "a" * 100_000 + ": 3", "glob.yaml": "domains: {a: '" + "**/" * 50 + "*'}\nvalidation: b.txt", "bad glob.yaml": "domains: {a: '[' }\nvalidation: b.txt",
    }  # fmt: skip
    found = [_file_case(name, content) for name, content in texts.items()]
    makers: dict[str, Callable[[Path], Any]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "loop": lambda path: os.symlink(path.name, path),
        "dangling link": lambda path: os.symlink("nothing", path),
        "no permission": lambda path: (path.write_text("domains: {a: b}"), path.chmod(0)),
        "link to a device": lambda path: os.symlink("/dev/zero", path),
    }
    for name, make in makers.items():
        for command in ("plan", "run", "tokenizer", "compare"):
            found.append(Case(KIND, f"{command}, {name}", _special(make, command)))
    for device in (
        "/dev/zero",
        "/dev/null",
        "/dev/urandom",
        "/dev/stdin",
        "/dev/full",
        "/proc/self/mem",
        "/nothing/at/all",
        "\ud800",
        "a" * 5000,
    ):
        name = repr(device[:30])
        found.append(
            Case(
                KIND,
                f"plan {name}",
                lambda _, device=device: ["plan", device.encode(errors="replace").decode()],
            )
        )
    found.append(
        Case(
            KIND,
            "plan /dev/stdin with a config",
            lambda folder: (small_config(folder), ["plan", "/dev/stdin"])[1],
            stdin="domains: {a: letters.txt}",
        )
    )
    return found


def _file_case(name: str, content: str | bytes) -> Case:
    def write(folder: Path) -> list[str]:
        small_config(folder)
        path = folder / name.replace(" ", "-")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["plan", path.name]

    return Case(KIND, name, write)


def _special(make: Callable[[Path], Any], command: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        make(folder / "odd.yaml")
        return [command, "odd.yaml"]

    return write
