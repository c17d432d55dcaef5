"""Batches of rows that are collated together: ranks, micro-batches, streams, workers and resuming."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from mixwell import Mixer, MixtureLoader
from mixwell.integrations.transformers.feed import BATCH, TrainerFeed

SIZES = {"web": 60, "code": 30, "wiki": 10}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.tensor([row["x"] for row in rows])}


def mixer() -> Mixer:
    model = torch.nn.Linear(1, 1)
    weights = {"web": 5.0, "code": 3.0, "wiki": 2.0}
    return Mixer(model, torch.optim.SGD(model.parameters(), lr=0.1), tuple(SIZES), horizon=5, weights=weights)


def new_loader(
    rank: int, world_size: int, *, rows: int, micro_batches: int, streams: bool = False, workers: int = 0
) -> MixtureLoader:
    made = {
        name: datasets.Dataset.from_dict({"x": [1000 * place + k for k in range(size)]})
        for place, (name, size) in enumerate(SIZES.items())
    }
    domains = {name: one.to_iterable_dataset(num_shards=2) if streams else one for name, one in made.items()}
    return MixtureLoader(
        domains,
        rows * micro_batches * world_size,
        micro_batches=micro_batches,
        collate=collate,
        block=4,
        num_workers=workers,
        rank=rank,
        world_size=world_size,
    )


@pytest.mark.parametrize("streams", [False, True])
def test_processes_have_the_rows_of_a_step_among_them(streams: bool) -> None:
    """2 processes x 2 micro-batches x 5 rows: as many of each domain as one process has in 20, none twice."""
    both = [
        new_loader(rank, 2, rows=5, micro_batches=2, streams=streams).follow(mixer()) for rank in range(2)
    ]
    alone = new_loader(0, 1, rows=20, micro_batches=1, streams=streams).follow(mixer())
    seen: Counter[int] = Counter()
    for _ in range(4):
        parts = [next(one) for one in both for _ in range(2)]
        whole = next(alone)
        rows = torch.cat([part.rows["x"] for part in parts]).tolist()
        labels = torch.cat([part.labels for part in parts]).tolist()
        assert Counter(labels) == Counter(whole.labels.tolist()) == {0: 10, 1: 6, 2: 4}
        assert [x // 1000 for x in rows] == labels
        if not streams:
            assert sorted(rows) == sorted(whole.rows["x"].tolist())
        seen.update(x for x in rows if x < 2000)
    assert max(seen.values()) == 1


def test_counts_make_the_mean_over_processes_the_weighted_loss() -> None:
    loaders = [new_loader(rank, 2, rows=5, micro_batches=2) for rank in range(2)]
    weights = mixer().weights.values
    total = np.zeros(3)
    for one in loaders:
        batches = one.follow(mixer())
        for _ in range(2):
            batch = next(batches)
            labels = batch.labels.numpy()
            expected = np.array([batch.expected_counts[name] for name in SIZES])
            total += np.bincount(labels, weights=(weights / expected)[labels], minlength=3) / 2
    np.testing.assert_allclose(total, weights)  # the rows of each domain count by its weight together


def test_workers_draw_no_further_than_the_round() -> None:
    made = new_loader(0, 1, rows=20, micro_batches=1, workers=1)
    batches = made.follow(mixer())
    for _ in range(5):
        next(batches)
    assert made.sampler.state()["batches"] == 5


def test_the_state_is_that_of_the_step_that_is_trained_on() -> None:
    first, second = (new_loader(0, 1, rows=10, micro_batches=2, workers=1) for _ in range(2))
    batches = first.follow(mixer())
    for _ in range(6):
        next(batches)
    state = first.state_dict()
    assert state["steps"] == 3
    second.load_state_dict(state)
    again = second.follow(mixer())
    for _ in range(4):
        assert torch.equal(next(again).rows["x"], next(batches).rows["x"])


def test_a_trainer_that_resumes_discards_empty_batches() -> None:
    feed = TrainerFeed(new_loader(0, 1, rows=10, micro_batches=2))
    feed.mixer, feed.passed_over = mixer(), 4
    batches = iter(feed)
    assert [next(batches) for _ in range(4)] == [{}] * 4
    inputs = next(batches)
    assert inputs["x"].tolist() == inputs[BATCH].rows["x"].tolist()


def test_rows_that_are_collated_together_are_sliced_by_domain() -> None:
    [batch] = new_loader(0, 1, rows=20, micro_batches=1).next_step(np.array([0.5, 0.3, 0.2]))
    parts = batch.by_domain(max_rows=4)
    assert [(part.domain, len(part.rows["x"])) for part in parts] == [
        ("web", 4),
        ("web", 4),
        ("web", 2),
        ("code", 4),
        ("code", 2),
        ("wiki", 4),
    ]
    assert torch.equal(torch.cat([part.rows["x"] for part in parts]), batch.rows["x"])
    assert [len(part) for part in batch.split(8)] == [8, 8, 4]
    assert batch.split(8)[1].expected_counts == {"web": 10, "code": 6, "wiki": 4}
