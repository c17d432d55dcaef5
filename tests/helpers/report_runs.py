"""Real runs of a tiny model, for the tests of reports: any number of domains, any number of runs."""

from __future__ import annotations

import os
import random
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from rich.console import Console

from mixwell.training import config_io
from mixwell.training.run import Run

SOURCES = (
    "web", "github", "arxiv", "books3", "stackexchange-mathematics-answers", "wikipedia",
    "pubmed-central", "common-crawl-2019-high-quality", "uspto", "law", "Übersetzungen", "dm_mathematics",
)  # fmt: skip
KINDS = ("", "-en", "$x$_v2", "-zh-Hans", "-code-and-comments")
"""Dollars, which matplotlib would read as a formula; letters beyond ASCII; names that are long."""
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("learned", {}),
    ("uniform", {"mixer": {"method": "fixed"}}),
    ("learned-T3-floor-of-half-a-percent", {"mixer": {"horizon": 3, "floor": 0.005}}),
    ("proportional_by_size", {"mixer": {"method": "fixed", "weights": "proportional"}}),
    ("learned-T6", {"mixer": {"horizon": 6}}),
    ("learned-seed-1", {"seed": 1}),
    ("learned-seed-2", {"seed": 2}),
    ("learned, at most half of the weight for one domain, seed 3", {"mixer": {"cap": 0.5}, "seed": 3}),
)
"""Runs that people would lay beside each other, by name: what differs from the first."""


def names(count: int) -> list[str]:
    """Names of domains, short and long."""
    return list(islice((source + kind for kind, source in product(KINDS, SOURCES)), count))


def write_runs(folder: Path, *, domains: int, runs: int = len(CHANGES), steps: int = 12) -> list[Path]:
    """Train tiny models on texts of so many domains, each in a run directory of its own."""
    chance = random.Random(domains)
    chosen = names(domains)
    wanted = [f"w{number}" for number in range(30)]
    for index, name in enumerate(chosen):
        # Domains are of different use: some have all words of the validation set, some have none.
        own, share = [chr(97 + index % 26) * 3 + str(index), "the", "of"], 1 - index / max(domains - 1, 1)
        length = chance.randint(60, 400)
        words = [chance.choice(wanted if chance.random() < share else own) for _ in range(length)]
        (folder / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "validation.txt").write_text(" ".join(chance.choice(wanted) for _ in range(400)))
    config: dict[str, Any] = {
        "domains": {name: f"{name}.txt" for name in chosen},
        "validation": "validation.txt",
        "steps": steps,
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
        "batch": {"rows": max(16, 8 * domains // 5)},
        "optimizer": {"lr": 0.02},
        "mixer": {"horizon": 4, "projection_rank": 8},
        "output": {"log_every": 2, "evaluate_every": 3, "evaluate_rows": 16},
    }
    written: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIXWELL_CACHE", str(folder / "cache"))
        for name, changes in CHANGES[:runs]:
            changed = dict(config)
            for key, value in changes.items():
                changed[key] = {**config[key], **value} if isinstance(value, dict) else value
            path = folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump(changed, sort_keys=False, allow_unicode=True), encoding="utf-8")
            Run(config_io.read_config(path), folder / name, console=Console(quiet=True)).start()
            written.append(folder / name)
    return written


def shared_folder(factory: pytest.TempPathFactory, name: str) -> tuple[Path, FileLock]:
    """A folder that all processes of a test session have in common, and a lock for who fills it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    return folder, FileLock(f"{folder}.lock")


def shared_runs(factory: pytest.TempPathFactory, *, domains: int) -> list[Path]:
    """Eight runs, trained by the first process that asks for them."""
    folder, lock = shared_folder(factory, f"report-runs-{domains}")
    with lock:
        if not folder.exists():
            folder.mkdir()
            write_runs(folder, domains=domains)
    return [folder / name for name, _ in CHANGES]
