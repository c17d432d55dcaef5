"""The batches of MixerTrainer in several processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from mixwell import Mixer
from mixwell.integrations.transformers.feed import LABELS, Cut, Feed

SIZES = {"web": 60, "code": 30, "wiki": 10}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.tensor([row["x"] for row in rows])}


def mixer() -> Mixer:
    model = torch.nn.Linear(1, 1)
    weights = {"web": 5.0, "code": 3.0, "wiki": 2.0}
    return Mixer(model, torch.optim.SGD(model.parameters(), lr=0.1), tuple(SIZES), horizon=5, weights=weights)


def feed(process: int, processes: int, *, rows: int, batches: int, streams: bool, workers: int = 0) -> Feed:
    made = {
        name: datasets.Dataset.from_dict({"x": [1000 * place + k for k in range(size)]})
        for place, (name, size) in enumerate(SIZES.items())
    }
    domains = {name: one.to_iterable_dataset(num_shards=2) if streams else one for name, one in made.items()}
    found = Feed(
        domains,
        Cut(rows, batches, (process, processes)),
        collate,
        least=None,
        block=4,
        seed=0,
        workers={"num_workers": workers},
    )
    found.follow(mixer())
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_processes_have_the_rows_of_a_step_among_them(streams: bool) -> None:
    """2 processes x 2 micro-batches x 5 rows: as many of each domain as one process has in 20, none twice."""
    both = [iter(feed(process, 2, rows=5, batches=2, streams=streams)) for process in range(2)]
    alone = iter(feed(0, 1, rows=20, batches=1, streams=streams))
    seen: Counter[int] = Counter()
    for _ in range(4):
        parts = [next(one) for one in both for _ in range(2)]
        whole = next(alone)
        rows = torch.cat([part["x"] for part in parts]).tolist()
        labels = torch.cat([part[LABELS] for part in parts]).tolist()
        assert Counter(labels) == Counter(whole[LABELS].tolist()) == {0: 10, 1: 6, 2: 4}
        assert [x // 1000 for x in rows] == labels
        if not streams:
            assert sorted(rows) == sorted(whole["x"].tolist())
        seen.update(x for x in rows if x < 2000)
    assert max(seen.values()) == 1


def test_counts_make_the_mean_over_processes_the_weighted_loss() -> None:
    feeds = [feed(process, 2, rows=5, batches=2, streams=False) for process in range(2)]
    weights = mixer().weights.values
    total = np.zeros(3)
    for one in feeds:
        batches = iter(one)
        for _ in range(2):
            labels = next(batches)[LABELS].numpy()
            expected = np.array([one.now.counts[name] for name in SIZES])
            total += np.bincount(labels, weights=(weights / expected)[labels], minlength=3) / 2
    np.testing.assert_allclose(total, weights)  # the rows of each domain count by its weight together


def test_workers_draw_no_further_than_the_round() -> None:
    made = feed(0, 1, rows=20, batches=1, streams=False, workers=1)
    batches = iter(made)
    for _ in range(5):
        next(batches)
    assert made._sampler.state()["batches"] == 5


def test_the_state_is_that_of_the_step_that_is_trained_on() -> None:
    first, second = (feed(0, 1, rows=10, batches=2, streams=False, workers=1) for _ in range(2))
    batches = iter(first)
    for _ in range(6):
        next(batches)
    state = first.state()
    assert state["steps"] == 3
    second.load_state(state, passed_over=4)
    again = iter(second)
    assert [next(again) for _ in range(4)] == [{}] * 4
    for _ in range(4):
        assert torch.equal(next(again)["x"], next(batches)["x"])
