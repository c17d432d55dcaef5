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
import re
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from helpers import commands
from helpers.mixture_files import mixture
from helpers.text_configs import write_config, write_texts
from helpers.toy_problems import Batch, mse, regression_batches, two_layer

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
    """A model with its optimizer, loss and validation set."""
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
    assert names["mixer"].horizon == 31
    assert max(names["mixer"].weights.average.items(), key=lambda item: item[1])[0] == "code"
    assert names["done"].finished
    assert (folder / "runs" / "mine" / "mixture.json").exists()


@page("methods.md")
def methods_page(folder: Path) -> Generator[Names]:
    names: Names = {**trained(), "loader": steps_of(["web", "code"], 30) * 15}
    yield names
    assert len(names["mixer"].rounds) == 1
    assert not names["mixer"].signal.requirements.validation


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
def text_folders(folder: Path) -> Generator[Names]:
    write_folders(folder)
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
    assert names["report"].horizon == 5


@page("guides/choosing-t.md")
def choosing_t(folder: Path) -> Generator[Names]:
    names = trained()
    yield names
    assert names["mixer"].horizon == 42
    assert names["paper"].horizon == 84


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


# --------------------------------------------------------------------------------------- with other libraries

DOCS = Path(__file__).parents[2] / "docs"


def dicts(batch: Batch, *, x: str = "x", y: str = "y") -> list[dict[str, Tensor]]:
    """Rows of their own, in the precision that most people train in."""
    return [{x: one.float(), y: other.float()} for one, other in zip(*batch, strict=True)]


def sources(names: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    """160 rows for each name."""
    return {name: dicts(batch) for name, batch in whole(steps_of(names, 10)).items()}


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
def trainer(folder: Path) -> Generator[Names]:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    def rows(low: int, high: int, count: int = 160) -> Any:
        tokens = torch.randint(low, high, (count, 16)).tolist()
        return datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))

    def pairs(scale: float) -> list[dict[str, Tensor]]:
        return [{"x": scale * torch.randn(4), "labels": torch.randn(2)} for _ in range(60)]

    own = {"web": rows(0, 40), "code": rows(24, 64)}
    labeled = [one.add_column("domain", [name] * len(one)) for name, one in own.items()]
    names: Names = {
        **own,
        "train": datasets.concatenate_datasets(labeled),
        "wanted": rows(24, 64, 120),
        "test": rows(24, 64, 40),
        "web_test": rows(0, 40, 40),
        "code_test": rows(24, 64, 40),
        "model": make_model(),
        "make_model": make_model,
        "near": pairs(1.0),
        "near_too": pairs(1.0),
        "far": pairs(3.0),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*no accelerator is found, then device pinned memory won't be used.*"
        )
        yield names
    again = names["again"]
    assert again.mixer.weights.average["code"] > 0.5
    resumed = names["model"].state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in again.model.state_dict().items())
    found = logged((name for entry in again.state.log_history for name in entry), own)
    assert found == documented("guides/trainer.md")
    assert (folder / "runs" / "mixed" / "mixture.json").exists()


@page("guides/datasets.md")
def datasets_(folder: Path) -> Generator[Names]:
    import datasets

    def stream(name: str) -> Any:
        rows = datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(600)]})
        return rows.to_iterable_dataset(num_shards=3)

    model = two_layer(0).float()
    names: Names = {
        **sources(["web", "code"]),
        "web_stream": stream("web"),
        "code_stream": stream("code"),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "row_losses": lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(dim=1),
    }
    wanted = [one.float() for one in regression_batches(0, steps=1)[1]]
    names["validation"] = itertools.repeat({"x": wanted[0], "y": wanted[1]})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*'set_vital' is deprecated.*")  # torchdata calls it
        yield names
    assert names["mixer"].steps_done == 60
    assert names["mixer"].rounds


@page("guides/lightning.md")
def lightning_(folder: Path) -> Generator[Names]:
    validation = regression_batches(0, steps=1)[1]
    domains = ["web", "code", "wiki"]
    names: Names = {**sources(domains), "wanted": dicts(validation)}
    with warnings.catch_warnings():
        for message in (
            r".*isinstance\(treespec, LeafSpec\).*",
            ".*does not have many workers.*",
            ".*You're resuming from a checkpoint that ended before the epoch ended.*",
            "Checkpoint directory .* exists and is not empty.*",
            ".*is smaller than the logging interval.*",
        ):
            warnings.filterwarnings("ignore", message)
        yield names
    found = logged(names["trainer"].callback_metrics, domains)
    assert found == documented("guides/lightning.md")


@page("guides/accelerate.md")
def accelerate_(folder: Path) -> Generator[Names]:
    domains = ["web", "code", "wiki"]
    names: Names = {**sources(domains), "wanted": dicts(regression_batches(0, steps=1)[1])}
    yield names
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert logged((name for line in lines for name in line), domains) == documented("guides/accelerate.md")


@page("guides/loggers.md")
def loggers(folder: Path) -> Generator[Names]:
    write_folders(folder)
    steps = steps_of(["web", "code", "wiki"], 30)
    own = whole(steps)
    names: Names = {
        **trained(),
        "loader": steps * 3,
        "web": own["web"],
        "code": own["code"],
        "wanted": regression_batches(0, steps=1)[1],
        "make_model": lambda: two_layer(0),
    }
    yield names
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
def export(folder: Path) -> Generator[Names]:
    import datasets

    run = folder / "runs" / "mixwell"
    run.mkdir(parents=True)
    average, last = {"web": 0.25, "code": 0.6, "wiki": 0.15}, {"web": 0.2, "code": 0.7, "wiki": 0.1}
    described = mixture(average, last=last, rows={"web": 9000, "code": 4000, "wiki": 1500})
    (run / "mixture.json").write_text(json.dumps(described))
    tokenized = {
        name: datasets.Dataset.from_dict({"domain": [name] * 400}).to_iterable_dataset() for name in average
    }
    names: Names = {"tokenized": tokenized}
    yield names
    assert names["weights"] == average
    drawn = [row["domain"] for row in names["training"].take(300)]
    assert drawn.count("code") > drawn.count("web") > drawn.count("wiki")
    compile((folder / "mixture.py").read_text(), "mixture.py", "exec")


@page("guides/distributed.md")
def scale(folder: Path) -> Generator[Names]:
    names = trained()
    names["domains"] = whole(steps_of(["web", "code"], 8))
    names["validation"] = next(names["validation"])
    address = f"file://{folder.resolve()}/processes"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    try:
        yield names
        assert names["mixer"].steps_done == 20
        assert (folder / "mixer").exists()
    finally:
        torch.distributed.destroy_process_group()
