"""Two processes give what one process gives on the rows of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.distributed_training import PROCESSES, Case, alone, in_processes, train_cases

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
CASES = [
    Case("ddp", "sgd", "dense", mixed=False),
    Case("ddp", "adamw", "dense", mixed=False, uneven=True),
    Case("ddp", "adamw", "dense", mixed=True),
    Case("ddp", "adamw", "carried", mixed=False),
    Case("ddp", "sgd", "sketched", mixed=False, uneven=True),
    Case("ddp", "sgd", "projected", mixed=True),
    Case("ddp", "adamw", "projected", mixed=True, uneven=True),
    Case("fsdp", "sgd", "dense", mixed=False),
    Case("fsdp", "adamw", "dense", mixed=False, uneven=True),
    Case("fsdp", "adamw", "carried", mixed=False),
    Case("fsdp", "adamw", "projected", mixed=True, uneven=True),
    Case("ddp", "adamw", "dense", mixed=False, dtype="float32"),
    Case("fsdp", "adamw", "dense", mixed=False, dtype="float32"),
]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("processes")
    in_processes(train_cases, CASES, str(folder))
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_match_one(case: Case, found: Found) -> None:
    one, other = (of_rank[case.name] for of_rank in found)
    assert one == other | {"nbytes": one["nbytes"]}
    expected = alone(case)
    tolerance = 1e-12 if case.dtype == "float64" else 1e-6
    first, reference = np.array(one["scores"][0]), np.array(expected["scores"][0])
    error = np.linalg.norm(first - reference) / np.linalg.norm(reference)
    assert error < tolerance
    # Every round has validation gradients at several points, whose spread all processes know.
    assert one["points"] == expected["points"] == [2] * case.rounds
    np.testing.assert_allclose(one["noise"][0], expected["noise"][0], rtol=1e4 * tolerance)
    np.testing.assert_allclose(one["weights"], expected["weights"], rtol=100 * tolerance)
    for here, there in zip(one["losses"], expected["losses"], strict=True):
        assert here == pytest.approx(there, rel=100 * tolerance)
