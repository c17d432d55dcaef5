"""Processes have the same weights, and say which one has not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.distributed_training import PROCESSES, differ, in_processes, lose
from mixwell.distributed.consistency import check_weights_in_sync

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


def test_rank_with_other_weights_is_named_on_all_ranks(tmp_path: Path) -> None:
    in_processes(differ, str(tmp_path))
    for rank in range(PROCESSES):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said.startswith("after round 0 the weights of process 1 are not those of the others: a is 0.")


def test_rank_that_differs_from_majority_is_named() -> None:
    weights = np.full((5, 2), 0.5)
    check_weights_in_sync(weights, ["web", "code"], round_index=3)
    weights[2] = np.nextafter(0.5, 1), 0.5  # the last bit
    with pytest.raises(RuntimeError, match=r"round 3 .* process 2 are not .*: web is 0\.5000000000000001 in"):
        check_weights_in_sync(weights, ["web", "code"], round_index=3)


def test_skipped_contributions_are_recorded_on_all_ranks(tmp_path: Path) -> None:
    in_processes(lose, str(tmp_path))
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES))
    assert one == other
    for way in ("ddp", "fsdp"):
        assert one[way]["skipped"] == one[way]["first"] == {"c": 1}
    assert all(np.isfinite(one[way]["weights"]).all() for way in one)
