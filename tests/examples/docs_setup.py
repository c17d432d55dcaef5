"""What the pages of the documentation take for granted: models, data and files, small ones.

A page whose code uses names of the reader's own gets them from a function here:

    @page("guides/own-loop.md")
    def own_loop(folder: Path) -> Generator[Names]:
        names = {"model": ..., "loader": ...}   # what its blocks may use; they run in `folder`
        yield names                             # now they run, in order, in these names
        assert names["mixer"].rounds            # what must be true afterwards

A page that is not here runs with no names of its own.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import commands
from problems import Batch, mse, regression_batches, two_layer
from training_texts import write_config, write_texts

Names = dict[str, Any]
Setup = Callable[[Path], Generator[Names]]
SETUPS: dict[str, Setup] = {}


def page(name: str) -> Callable[[Setup], Setup]:
    """Registers the setup of a page, by its path in docs/."""

    def register(setup: Setup) -> Setup:
        SETUPS[name] = setup
        return setup

    return register


def nothing(folder: Path) -> Generator[Names]:
    yield {}


def row_losses(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def steps_of(names: list[str], count: int) -> list[dict[str, Batch]]:
    """Batches by domain; the target is nearest to the second domain."""
    batches, _ = regression_batches(0, steps=count, domains=len(names))
    return [dict(zip(names, step.values(), strict=True)) for step in batches]


def whole(steps: list[dict[str, Batch]]) -> dict[str, Batch]:
    """The rows of all steps, by domain."""
    return {
        name: (torch.cat([step[name][0] for step in steps]), torch.cat([step[name][1] for step in steps]))
        for name in steps[0]
    }


def trained() -> Names:
    """A model with its optimiser, loss and validation set."""
    model = two_layer(0)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loss": mse,
        "row_losses": row_losses,
        "validation": itertools.repeat(regression_batches(0, steps=30)[1]),
    }


@page("index.md")
def index(folder: Path) -> Generator[Names]:
    names: Names = {}
    yield names
    assert names["mixer"].horizon == 62
    assert max(names["mixer"].weights.average.items(), key=lambda item: item[1])[0] == "code"
    assert names["done"].finished
    assert (folder / "runs" / "mine" / "mixture.json").exists()


@page("guides/own-loop.md")
def own_loop(folder: Path) -> Generator[Names]:
    steps = steps_of(["web", "code", "wiki"], 30)
    names: Names = {
        **trained(),
        "loader": steps * 30,
        "datasets": whole(steps),
        "micro_batches": lambda domain: [step[domain] for step in steps[:4]],
        "iterator": iter(steps),
    }
    yield names
    assert set(names["mixer"].weights.names) == {"web", "code", "wiki"}
    assert names["fixed"].nbytes < names["mixer"].nbytes


@page("guides/text-folders.md")
def text_folders(folder: Path) -> Generator[Names]:
    texts = folder / "texts"
    texts.mkdir()
    write_texts(texts)
    places = {
        "web": "letters",
        "books": "numbers",
        "more-books": "marks",
        "wanted": "validation",
        "wanted-too": "test",
    }
    for place, name in places.items():
        (folder / "data" / place).mkdir(parents=True)
        (folder / "data" / place / "text.txt").write_text((texts / f"{name}.txt").read_text())
    (folder / "data" / "code").mkdir()
    with gzip.open(folder / "data" / "code" / "a.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"content": (texts / "numbers.txt").read_text()}) + "\n")
    yield {}
    told = json.loads((folder / "runs" / "mixwell" / "mixture.json").read_text())
    assert told["domains"] == ["web", "code", "books"]
    assert (folder / "runs" / "mixwell" / "report.html").exists()


@page("guides/images.md")
def images(folder: Path) -> Generator[Names]:
    def digits() -> tuple[Tensor, Tensor]:
        return torch.randn(300, 1, 28, 28), torch.randint(10, (300,))

    names: Names = {name: digits() for name in ("clean", "rotated", "noisy", "wanted", "held_out")}
    yield names
    assert names["done"].finished
    assert (folder / "runs" / "images" / "mixture.json").exists()


@page("guides/many-domains.md")
def many_domains(folder: Path) -> Generator[Names]:
    datasets = whole(steps_of([f"topic-{i:02d}" for i in range(64)], 4))
    names: Names = {**trained(), "datasets": datasets, "few": steps_of(["a", "b"], 5)}
    yield names
    assert len(names["ranked"]) == 64
    assert len(names["mixer"].rounds) == 1


@page("guides/choosing-t.md")
def choosing_t(folder: Path) -> Generator[Names]:
    names = trained()
    yield names
    assert names["mixer"].horizon == names["paper"].horizon == 84


@page("guides/reading-the-report.md")
def reading_the_report(folder: Path) -> Generator[Names]:
    commands.mixwell("run", write_config(folder), "--out", "runs/mixwell", "--no-report", cwd=folder)
    names: Names = {}
    yield names
    assert names["rounds"]


@page("guides/resuming.md")
def resuming(folder: Path) -> Generator[Names]:
    names: Names = {
        **trained(),
        "make_model": lambda: nn.Linear(6, 4, dtype=torch.float64),
        "domains": whole(steps_of(["web", "code"], 10)),
        "validation": regression_batches(0, steps=1)[1],
    }
    yield names
    assert names["done"].finished
    assert names["longer"].weights.last == names["mixer"].weights.last
