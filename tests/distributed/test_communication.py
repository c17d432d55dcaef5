"""The traffic of distributed training, counted, compared with plain data parallelism and with the formula."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from helpers.communication_counts import ARMS, DOMAINS, LONG, POINTS, Net, count
from helpers.distributed_training import PROCESSES, in_processes
from mixwell.distributed.communication import Traffic, TrafficModel
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traffic]:
    folder = tmp_path_factory.mktemp("bytes")
    in_processes(count, str(folder))
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    assert both[0] == both[1]
    return {name: Traffic(**one) for name, one in both[0].items()}


@pytest.mark.parametrize(("way", "kind"), [("ddp", "dense"), ("ddp", "projected"), ("fsdp", "projected")])
def test_long_round_adds_one_percent_communication(way: str, kind: str, found: dict[str, Traffic]) -> None:
    limit = 1.01 if way == "ddp" else 1.02  # shards are put together to be projected
    assert found[f"{way}-{kind}-1"].total <= limit * found[f"{way}-plain-1"].total


@pytest.mark.parametrize(
    ("way", "kind", "points"),
    [(way, kind, points) for way, kind in ARMS for points in (1, POINTS) if kind != "plain" or points == 1],
)
def test_formula_matches_counted_bytes(way: Any, kind: str, points: int, found: dict[str, Traffic]) -> None:
    model = Net()
    parameters = Parameters.of(model, torch.optim.AdamW(model.parameters()))
    training = TrafficModel(
        way,
        size=sum(p.nbytes for p in model.parameters()),
        tensors=len(parameters),
        domains=DOMAINS,
        world_size=PROCESSES,
        mixed=kind == "projected",
        projected=Projections(parameters, 8, 0).size if kind == "projected" else 0,
        preconditioned=True,
        kept=sum(p.nbytes for p in model.last.parameters()),
    )
    mixed = training.step * LONG + training.round(points=points)
    expected = training.plain_step * LONG if kind == "plain" else mixed
    # Sums begin at multiples of 16 numbers, and shards of an odd size are filled up.
    assert found[f"{way}-{kind}-{points}"].total == pytest.approx(expected.total, rel=0.01)
