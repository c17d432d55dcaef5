"""What several processes saved in the middle of a round is taken up by any number of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.distributed_training import PROCESSES, STEPS, Case, in_processes, resume_cases, save_cases

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
CASES = [
    Case("ddp", "sgd0", "dense", mixed=False, rounds=2),
    Case("ddp", "sgd0", "projected", mixed=True, rounds=2),
    Case("fsdp", "sgd0", "dense", mixed=False, rounds=2),
    Case("fsdp", "sgd0", "projected", mixed=True, rounds=2),
    Case("ddp", "sgd0", "bfloat16", mixed=False, dtype="float32", rounds=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    # After step 3 of 4: between the two validation points of the second round.
    in_processes(save_cases, CASES, STEPS + 3, str(folder))
    for count in (2, 3):
        in_processes(resume_cases, CASES, str(folder), count=count)
    resume_cases(CASES, str(folder))
    return folder


def read(folder: Path, *names: object) -> dict[str, Any]:
    found = json.loads(Path(folder, ".".join(map(str, names)) + ".json").read_text())
    return {key: value for key, value in found.items() if key != "nbytes"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resume_with_same_world_size_is_bit_for_bit(case: Case, folder: Path) -> None:
    for rank in range(PROCESSES):
        assert read(folder, case.name, 2, rank) == read(folder, case.name, rank)
        assert read(folder, case.name, rank)["points"] == [2, 2]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resume_with_other_world_size(case: Case, count: int, folder: Path) -> None:
    expected = read(folder, case.name, 0)
    tolerance = 1e-10 if case.dtype == "float64" else 0.05  # rounding at random to bfloat16
    for rank in range(count):
        found = read(folder, case.name, count, rank)
        np.testing.assert_allclose(found["scores"][1], expected["scores"][1], rtol=tolerance)
        np.testing.assert_allclose(found["weights"], expected["weights"], rtol=tolerance)
        assert found["losses"][1] == pytest.approx(expected["losses"][1], rel=max(tolerance, 1e-5))
