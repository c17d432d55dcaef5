"""The ten lines of the README run as they stand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch

from helpers.toy_problems import mse, names, regression_batches, two_layer

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_code_block_runs() -> None:
    block = blocks()[0].replace("20_000", "900")
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


def test_named_files_exist() -> None:
    named = r"(?:`|\()((?:examples|bench|docs|tests|results)/[\w./-]+?)(?:#[\w-]+)?(?:`|\))"
    for name in re.findall(named, README.read_text()):
        assert (README.parent / name).exists(), name
