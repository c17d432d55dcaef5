"""Two processes through Accelerate, Lightning and transformers give what one gives on the rows of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.distributed_training import in_processes
from helpers.integration_training import HORIZON, POINTS, PROCESSES, STEPS, Case, alone, train_plans, written

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.filterwarnings("ignore"),
]
CASES = [
    Case("accelerate", "ddp", "projected"),
    Case("accelerate", "ddp", "dense", accumulation=2),
    Case("accelerate", "ddp", "dense", mixed=False),
    Case("accelerate", "fsdp", "projected", accumulation=2),
    Case("accelerate", "fsdp", "dense", mixed=False),
    Case("lightning", "ddp", "projected"),
    Case("lightning", "ddp", "dense", accumulation=2),
    Case("lightning", "fsdp", "projected"),
    Case("lightning", "fsdp", "projected", accumulation=2),
    Case("trainer", "ddp", "projected"),
    Case("trainer", "ddp", "dense", accumulation=2),
    Case("streams", "ddp", "projected", accumulation=2),
]
SAVED = [case for case in CASES if case.mixed]
BY_ONE = [case for case in SAVED if case.integration == "trainer"]
MESSAGES = {
    Case("lightning", "fsdp", "dense"): "DenseTraces() cannot separate a mixed batch",
    Case("lightning", "tensors", "projected"): "2 processes share each layer (tensor_parallel_size)",
    Case("flat", "fsdp", "dense", mixed=False): "FullyShardedDataParallel (FSDP1) flattens the parameters",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integrations")
    two, one = folder / "two", folder / "one"
    two.mkdir()
    one.mkdir()
    train_plans([(BY_ONE, False, str(one))])
    plans = [([*CASES, *MESSAGES], False, str(two)), (SAVED, True, str(two)), (BY_ONE, True, str(one))]
    in_processes(train_plans, plans)
    train_plans([([case for case in SAVED if case.way == "ddp"], True, str(two))])
    return folder


def read(folder: Path, case: Case, *, resumed: bool = False, count: int = PROCESSES) -> list[dict[str, Any]]:
    names = [written(case, resumed=resumed, count=count, rank=rank) for rank in range(count)]
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


def check_weights_in_sync(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal but for rounding."""
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-10)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-10)
    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_match_one(case: Case, folder: Path) -> None:
    one, other = read(folder / "two", case)
    assert one == other
    names = [written(case, resumed=False, count=PROCESSES, rank=rank) for rank in range(PROCESSES)]
    ran = [torch.load(folder / "two" / f"{name}.pt", weights_only=False) for name in names]
    assert not torch.equal(ran[0][0][0].x, ran[1][0][0].x)
    assert np.ptp(one["weights"]) > 0.1
    assert one["points"] == [POINTS] * (STEPS // HORIZON)
    check_weights_in_sync(one, alone(case, ran))


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_resume_is_bit_for_bit(case: Case, folder: Path) -> None:
    found, expected = read(folder / "two", case, resumed=True), read(folder / "two", case)
    # With dense traces the first mixed batch of a mixer is looked at, and rounded otherwise than those after it.
    # With fully_shard in Accelerate the gradient of the first step of several micro-batches is.
    otherwise = case.traces == "dense" or (case.integration, case.way) == ("accelerate", "fsdp")
    if otherwise:
        assert found[0] == found[1]
        check_weights_in_sync(found[0], expected[0])
    else:
        assert found == expected


@pytest.mark.parametrize("case", BY_ONE, ids=lambda case: case.name)
def test_trainer_resumes_with_other_world_size(case: Case, folder: Path) -> None:
    both, _ = read(folder / "two", case)
    check_weights_in_sync(read(folder / "one", case, count=1)[0], both)
    check_weights_in_sync(read(folder / "two", case, resumed=True, count=1)[0], both)
    one, other = read(folder / "one", case, resumed=True)
    assert one == other
    check_weights_in_sync(one, both)


def test_per_rank_positions_need_same_world_size(folder: Path) -> None:
    messages = {
        "accelerate": "the state is of one of 2 processes, and there are 1; each has its own place in the data",
        "lightning": "the checkpoint is of 2 processes, and there are 1; each has its own place in the data",
        "streams": "was saved by 2 processes, and there are 1; each reads its own part of a stream",
    }
    for case in SAVED:
        if case.integration in messages and case.way == "ddp":
            (found,) = read(folder / "two", case, resumed=True, count=1)
            assert messages[case.integration] in found["error"]


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: case.name)
def test_unsupported_strategies_give_error(case: Case, folder: Path) -> None:
    for found in read(folder / "two", case):
        assert MESSAGES[case] in found["error"]
