"""The ten lines of the README run as they stand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import mixwell
from helpers.toy_problems import mse, names, regression_batches, two_layer

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_a_run_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    datasets = [TensorDataset(torch.randn(40, 3), torch.randn(40, 1)) for _ in range(3)]
    scope: dict[str, Any] = {
        "mixwell": mixwell,
        "web_dataset": datasets[0],
        "code_dataset": datasets[1],
        "validation": datasets[2],
        "model": torch.nn.Linear(3, 1),
        "loss": mse,
    }
    exec(blocks()[0].replace("5000", "50"), scope)
    assert scope["done"].finished
    assert (tmp_path / "runs" / "mine" / "mixture.json").exists()


def test_the_ten_lines() -> None:
    block = blocks()[1].replace("20_000", "900")
    batches, validation = regression_batches(0, steps=30)
    model = two_layer(0).float()
    datasets = {
        name: tuple(torch.cat([step[own][part] for step in batches]).float() for part in range(2))
        for name, own in zip(("web", "code", "wiki"), names(3), strict=True)
    }
    scope: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "datasets": datasets,
        "loss": mse,
        "validation": itertools.repeat(tuple(part.float() for part in validation)),
    }
    exec(block, scope)
    mixer = scope["mixer"]
    assert mixer.steps_done == 900
    assert len(mixer.rounds) == -(-900 // mixer.horizon) == 23
    assert mixer.weights.last["code"] > 1 / 3


def test_mixed_batches() -> None:
    block = blocks()[2].replace("...  # validation as above", "break")
    batches, _ = regression_batches(0, steps=1)
    model = two_layer(0)
    rows = dict(zip(("web", "code", "wiki"), batches[0].values(), strict=True))
    scope: dict[str, Any] = {
        "mixwell": mixwell,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loader": mixwell.MixtureLoader(rows, 48),
        "row_losses": lambda model, rows: (model(rows[0]) - rows[1]).square().mean(dim=1),
    }
    exec(block, scope)
    assert scope["mixer"].steps_done == 1


def test_the_files_it_names_are_there() -> None:
    for name in re.findall(r"`((?:examples|bench|docs)/[\w.]+)`", README.read_text()):
        assert (README.parent / name).exists(), name
