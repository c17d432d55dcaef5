"""The ten lines of the README run as they stand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch

from problems import mse, regression_batches, two_layer

README = Path(__file__).parents[2] / "README.md"


def test_the_ten_lines() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    batches, validation = regression_batches(0, steps=30)
    model = two_layer(0)
    renamed = [dict(zip(("web", "code", "wiki"), step.values(), strict=True)) for step in batches]
    scope: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loader": renamed * 30,
        "loss": mse,
        "validation": itertools.repeat(validation),
    }
    exec(block, scope)
    mixer = scope["mixer"]
    assert mixer.steps_done == 900
    assert len(mixer.rounds) == 900 // mixer.horizon == 2
    assert mixer.weights.last["code"] > 1 / 3


def test_the_files_it_names_are_there() -> None:
    for name in re.findall(r"`((?:examples|bench|docs)/[\w.]+)`", README.read_text()):
        assert (README.parent / name).exists(), name
