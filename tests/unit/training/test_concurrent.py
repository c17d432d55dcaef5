"""Several runs side by side, and runs from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import mixwell
from helpers.text_configs import TINY, WORDS, lines, write_config
from mixwell.lab import arms, tables
from mixwell.report import arms as report
from mixwell.training import config_io
from mixwell.training.trainer import Trainer


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three arms of a tiny run."""
    folder = tmp_path_factory.mktemp("arms")
    base = config_io.read(write_config(folder))
    alone = arms.Arm("letters alone", {"method": "fixed"}, domains=["letters"])
    chosen = [arms.LEARNED, arms.PROPORTIONAL, alone]
    arms.run(base, chosen, seeds=2, out=folder / "out", workers=2, console=Console(quiet=True))
    return folder


def test_arms_are_told_in_tables(compared: Path) -> None:
    rows = tables.read(compared / "out" / arms.RUNS)
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for arm in ("learned", "proportional", "letters alone") for seed in (0, 1)
    ]
    assert all(row["steps"] == 24 and 0 < float(row["test_loss"]) < 6 for row in rows)
    weights = tables.read(compared / "out" / arms.WEIGHTS)
    sizes = {name: (compared / f"{name}.txt").stat().st_size for name in WORDS}
    for row in weights:
        if row["arm"] == "proportional":
            share = sizes[str(row["domain"])] / sum(sizes.values())
            assert float(row["weight"]) == pytest.approx(share, abs=0.01)  # rows are whole
    assert {row["domain"] for row in weights if row["arm"] == "letters alone"} == {"letters"}
    # A run of an arm is the run that a user would get.
    own = mixwell.train(
        {name: str(compared / f"{name}.txt") for name in WORDS},
        str(compared / "validation.txt"),
        test=str(compared / "test.txt"),
        out=compared / "own",
        quiet=True,
        **TINY,
    )
    assert own.finished
    assert lines(compared / "own") == lines(compared / "out" / "runs" / "learned-0")


def test_arms_are_not_mixed_with_other_settings(compared: Path) -> None:
    base = config_io.read(compared / "tiny.yaml", ["optimizer.lr=0.5"])
    with pytest.raises(
        ValueError, match=r"learned-0 is a run with other settings \(optimizer.lr is 0.\d+ here"
    ):
        arms.run(base, [arms.LEARNED], seeds=1, out=compared / "out", workers=1, console=Console(quiet=True))


def test_findings_count_the_seeds(compared: Path) -> None:
    rows = tables.read(compared / "out" / arms.RUNS)
    first, second = report.findings(rows)
    by = {(row["arm"], row["seed"]): float(row["test_loss"]) for row in rows}
    lower = sum(by["learned", seed] < by["proportional", seed] for seed in (0, 1))
    assert first.startswith("learned against proportional: test loss ")
    assert f"lower in {lower} of 2 seeds" in first
    assert second.startswith("learned against letters alone: ")


def test_train_from_python_with_ones_own_model(tmp_path: Path) -> None:
    """A target made by the first domain's rule: its weight grows, and a second call continues the run."""
    torch.manual_seed(0)

    def rows(sign: float) -> TensorDataset:
        inputs = torch.randn(256, 4)
        return TensorDataset(inputs, (sign * inputs[:, 0] > 0).long())

    domains, validation = {"right": rows(1), "wrong": rows(-1)}, rows(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def go(steps: int, folder: str, *, resume: bool = False) -> Trainer:
        torch.manual_seed(1)
        return mixwell.train(
            domains,
            validation,
            model=nn.Linear(4, 2),
            loss=loss,
            out=tmp_path / folder,
            steps=steps,
            batch={"rows": 16},
            optimizer={"kind": "sgd", "lr": 0.1},
            resume=resume,
            quiet=True,
        )

    done = go(60, "run")
    assert done.mixer.weights.last["right"] > 0.7
    assert json.loads((tmp_path / "run" / "mixture.json").read_text())["finished"]
    with pytest.raises(OSError, match="there is a run in .* already"):
        go(60, "run")
    with pytest.raises(ValueError, match="steps is 50 here and 60 there"):
        go(50, "run", resume=True)
    again = go(60, "run", resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(done.model.parameters(), again.model.parameters(), strict=True)
    )


def test_weights_stay_without_a_signal() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"a": 0.7, "b": 0.3}
    mixer = mixwell.Mixer(
        model, optimizer, list(given), horizon=2, weights=given, signal=mixwell.ConstantWeights()
    )
    for _ in range(6):
        for name in given:
            with mixer.domain(name):
                model(torch.randn(3, 2)).square().mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model(torch.randn(3, 2)).square().mean().backward()
    assert mixer.weights.last == pytest.approx(given)
