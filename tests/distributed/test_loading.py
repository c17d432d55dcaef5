"""A loader in several processes, with workers: together they give what one process gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.distributed_training import in_processes, load_rows

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


def seen(folder: Path, count: int, workers: int) -> tuple[list[dict[str, list[int]]], list[Any]]:
    """The rows of every step, of all processes; and the weights of each."""
    each = [json.loads((folder / f"{count}-{workers}-{rank}.json").read_text()) for rank in range(count)]
    steps: list[dict[str, list[int]]] = []
    for parts in zip(*(rows for rows, _ in each), strict=True):
        names = sorted({name for part in parts for name in part})
        steps.append({name: sorted(row for part in parts for row in part.get(name, [])) for name in names})
    return steps, [weights for _, weights in each]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for workers in (0, 2):
        load_rows(workers, str(folder))
    in_processes(load_rows, 0, str(folder))
    in_processes(load_rows, 2, str(folder))
    in_processes(load_rows, 0, str(folder), count=3)
    return folder


@pytest.mark.parametrize(("count", "workers"), [(1, 2), (2, 0), (2, 2), (3, 0)])
def test_rows_do_not_depend_on_ranks_or_workers(count: int, workers: int, folder: Path) -> None:
    expected, (weights,) = seen(folder, 1, 0)
    found, others = seen(folder, count, workers)
    assert len(found) == 18
    assert found == expected
    assert all(other == others[0] for other in others)
    np.testing.assert_allclose(others[0], weights, rtol=1e-5)


def test_no_row_repeats_within_epoch(folder: Path) -> None:
    steps, _ = seen(folder, 2, 2)
    for name, size in (("a", 40), ("b", 17), ("c", 5)):
        rows = [row for step in steps for row in step.get(name, [])]
        # In a step that ends an epoch the order within it is not known; whole epochs are.
        counts = np.bincount(np.array(rows) % 100, minlength=size)
        assert counts.max() - counts.min() <= 1
        assert len(rows) > size or name == "a"
