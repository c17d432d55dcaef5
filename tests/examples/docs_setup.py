"""What stands around the pages of the documentation when they run: files before them, checks after them.

A page defines the names that its code uses, so that a reader can paste it. A function here may write files that a
page's configs and commands read, and checks the outcome:

    @page("guides/own-loop.md")
    def own_loop(folder: Path, names: Names) -> Generator[None]:
        yield  # now the blocks run in `folder`, in order, in `names`, which is empty before
        assert names["mixer"].rounds

A page that is not here runs in an empty folder, and nothing is checked but that it runs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import torch

from helpers import commands
from helpers.mixture_files import mixture
from helpers.text_configs import write_config, write_texts

Names = dict[str, Any]
Setup = Callable[[Path, Names], Generator[None]]
SETUPS: dict[str, Setup] = {}


def page(name: str) -> Callable[[Setup], Setup]:
    """Registers the setup of a page, by its path in docs/."""

    def register(setup: Setup) -> Setup:
        SETUPS[name] = setup
        return setup

    return register


def nothing(folder: Path, names: Names) -> Generator[None]:
    yield


@page("../README.md")
def readme(folder: Path, names: Names) -> Generator[None]:
    yield
    mixer = names["mixer"]
    assert mixer.steps_done == 1000
    assert len(mixer.rounds) == 24
    assert max(mixer.weights.average.items(), key=lambda item: item[1])[0] == "code"


@page("index.md")
def index(folder: Path, names: Names) -> Generator[None]:
    yield
    assert names["mixer"].horizon == 31
    assert max(names["mixer"].weights.average.items(), key=lambda item: item[1])[0] == "code"
    assert names["done"].finished
    assert (folder / "runs" / "mine" / "mixture.json").exists()


@page("methods.md")
def methods_page(folder: Path, names: Names) -> Generator[None]:
    yield
    assert len(names["mixer"].rounds) > 1
    assert not names["mixer"].signal.requirements.validation


@page("guides/own-loop.md")
def own_loop(folder: Path, names: Names) -> Generator[None]:
    yield
    assert set(names["mixer"].weights.names) == {"web", "code", "wiki"}
    assert names["fixed"].nbytes < names["mixer"].nbytes


def write_folders(folder: Path) -> None:
    """Folders of text in data/, and one of JSON Lines."""
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


@page("guides/text-folders.md")
def text_folders(folder: Path, names: Names) -> Generator[None]:
    write_folders(folder)
    yield
    told = json.loads((folder / "runs" / "mixwell" / "mixture.json").read_text())
    assert told["domains"] == ["web", "code", "books"]
    assert (folder / "runs" / "mixwell" / "report.html").exists()


@page("guides/images.md")
def images(folder: Path, names: Names) -> Generator[None]:
    yield
    assert names["done"].finished
    assert names["done"].mixer.weights.average["rotated"] > 1 / 3
    assert (folder / "runs" / "images" / "mixture.json").exists()


@page("guides/many-domains.md")
def many_domains(folder: Path, names: Names) -> Generator[None]:
    yield
    assert len(names["ranked"]) == 64
    assert names["report"].horizon == 5


@page("guides/choosing-t.md")
def choosing_t(folder: Path, names: Names) -> Generator[None]:
    yield
    assert names["mixer"].horizon == 42
    assert names["paper"].horizon == 84


@page("guides/reading-the-report.md")
def reading_the_report(folder: Path, names: Names) -> Generator[None]:
    commands.mixwell("run", write_config(folder), "--out", "runs/mixwell", "--no-report", cwd=folder)
    yield
    assert names["rounds"]


@page("guides/resuming.md")
def resuming(folder: Path, names: Names) -> Generator[None]:
    yield
    assert names["done"].finished
    assert names["longer"].weights.last == names["mixer"].weights.last


# --------------------------------------------------------------------------------------- with other libraries

DOCS = Path(__file__).parents[2] / "docs"


def documented(page: str) -> set[str]:
    """The metric names that a page lists, except for one that is written only where something went wrong."""
    text = (DOCS / page).read_text(encoding="utf-8")
    names = set(re.findall(r"`(mixwell/[a-z_]+(?:/<\w+>|/validation)?)`", text))
    return names - {"mixwell/skipped/<domain>", "mixwell/step"}


def logged(names: Iterable[str], domains: Iterable[str]) -> set[str]:
    """Names of logs as a table has them."""
    found = {name for name in names if name.startswith("mixwell/")}
    for domain in domains:
        found = {re.sub(rf"/{domain}$", "/<domain>", name) for name in found}
    return {re.sub(r"^mixwell/measured/.*", "mixwell/measured/<what>", name) for name in found}


@page("guides/trainer.md")
def trainer(folder: Path, names: Names) -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*no accelerator is found, then device pinned memory won't be used.*"
        )
        yield
    again = names["again"]
    assert again.mixer.weights.average["code"] > 0.5
    resumed = names["model"].state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in again.model.state_dict().items())
    found = logged((name for entry in again.state.log_history for name in entry), ["web", "code"])
    assert found == documented("guides/trainer.md")
    assert (folder / "runs" / "mixed" / "mixture.json").exists()


@page("guides/datasets.md")
def datasets_(folder: Path, names: Names) -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*'set_vital' is deprecated.*")  # torchdata calls it
        yield
    assert names["mixer"].steps_done == 60
    assert names["mixer"].rounds


@page("guides/lightning.md")
def lightning_(folder: Path, names: Names) -> Generator[None]:
    domains = ["web", "code", "wiki"]
    with warnings.catch_warnings():
        for message in (
            r".*isinstance\(treespec, LeafSpec\).*",
            ".*does not have many workers.*",
            ".*You're resuming from a checkpoint that ended before the epoch ended.*",
            "Checkpoint directory .* exists and is not empty.*",
            ".*is smaller than the logging interval.*",
        ):
            warnings.filterwarnings("ignore", message)
        yield
    found = logged(names["trainer"].callback_metrics, domains)
    assert found == documented("guides/lightning.md")


@page("guides/accelerate.md")
def accelerate_(folder: Path, names: Names) -> Generator[None]:
    domains = ["web", "code", "wiki"]
    yield
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert logged((name for line in lines for name in line), domains) == documented("guides/accelerate.md")


@page("guides/loggers.md")
def loggers(folder: Path, names: Names) -> Generator[None]:
    write_folders(folder)
    yield
    assert list((folder / "logs").glob("events.*"))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert list((folder / "runs" / "mixwell" / "tensorboard").glob("events.*"))
    written = [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]
    found = logged((name for line in written for name in line), ["web", "books"])
    sets = {"mixwell/evaluation/validation": "mixwell/evaluation/<set>"}
    assert {sets.get(name, name) for name in found} == documented("guides/loggers.md")
    assert (folder / "runs" / "mine" / "logged.jsonl").exists()


@page("guides/export.md")
def export(folder: Path, names: Names) -> Generator[None]:
    run = folder / "runs" / "mixwell"
    run.mkdir(parents=True)
    average, last = {"web": 0.25, "code": 0.6, "wiki": 0.15}, {"web": 0.2, "code": 0.7, "wiki": 0.1}
    described = mixture(average, last=last, rows={"web": 9000, "code": 4000, "wiki": 1500})
    (run / "mixture.json").write_text(json.dumps(described))
    yield
    assert names["weights"] == average
    drawn = [row["domain"] for row in names["training"].take(300)]
    assert drawn.count("code") > drawn.count("web") > drawn.count("wiki")
    compile((folder / "mixture.py").read_text(), "mixture.py", "exec")


@page("guides/distributed.md")
def distributed(folder: Path, names: Names) -> Generator[None]:
    before = dict(os.environ)
    try:
        yield
        assert names["mixer"].steps_done == 20
        assert (folder / "mixer").exists()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name in set(os.environ) - set(before):
            del os.environ[name]
