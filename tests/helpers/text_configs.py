"""Small texts and configs for the tests of runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = {
    "letters": ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven"],
    "marks": ["+", "-", "*", "/", "(", ")", "=="],
}
TINY = {
    "steps": 24,
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
    "batch": {"rows": 8},
    "mixer": {"horizon": 5},
    "output": {"log_every": 4, "evaluate_every": 6, "evaluate_rows": 16, "checkpoint_every": 7},
}


def write_texts(folder: Path) -> None:
    """A text for each of three domains, and one of letters for validation and test."""
    chance = random.Random(0)
    for name, words in WORDS.items():
        text = " ".join(chance.choice(words) for _ in range(1500))
        (folder / f"{name}.txt").write_text(text)
    for name in ("validation", "test"):
        (folder / f"{name}.txt").write_text(" ".join(chance.choice(WORDS["letters"]) for _ in range(700)))


def write_config(folder: Path, **changes: Any) -> Path:
    """A config of a tiny run on those texts."""
    write_texts(folder)
    plain: dict[str, Any] = {
        "domains": {name: f"{name}.txt" for name in WORDS},
        "validation": "validation.txt",
        "test": "test.txt",
        **TINY,
    }
    for key, value in changes.items():
        plain[key] = {**plain[key], **value} if isinstance(value, dict) and key in plain else value
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without its timings."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]
