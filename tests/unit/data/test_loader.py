"""Batches of rows that are collated together: ranks, micro-batches, streams, workers and resuming."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from mixwell import Mixer, MixtureLoader
from mixwell.integrations.batches import FollowedBatches

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
def test_ranks_partition_rows_of_a_step(streams: bool) -> None:
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


def test_mean_over_ranks_equals_weighted_loss() -> None:
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


def test_workers_prefetch_only_within_round() -> None:
    made = new_loader(0, 1, rows=20, micro_batches=1, workers=1)
    batches = made.follow(mixer())
    for _ in range(5):
        next(batches)
    assert made.sampler.state()["batches"] == 5


def test_state_matches_current_training_step() -> None:
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


def test_resumed_trainer_discards_empty_batches() -> None:
    followed = FollowedBatches(new_loader(0, 1, rows=10, micro_batches=2))
    followed.mixer, followed.skipped = mixer(), 4
    batches = iter(followed)
    assert [next(batches) for _ in range(4)] == [{}] * 4
    inputs = next(batches)
    assert inputs["x"].tolist() == followed.next().rows["x"].tolist()


def test_collated_rows_are_sliced_by_domain() -> None:
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


class Augmented(Dataset[torch.Tensor]):
    """Rows with noise of each kind of generator, as random transforms of images have it."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_a_resumed_run_draws_the_same_augmentations(together: bool, workers: int) -> None:
    def new() -> MixtureLoader:
        made = torch.stack if together else None
        return MixtureLoader({name: Augmented() for name in SIZES}, 10, collate=made, num_workers=workers)

    first, second = new(), new()
    batches = first.follow(mixer())
    for _ in range(3):
        next(batches)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(17)  # another process has other generators
    again = second.follow(mixer())
    for _ in range(4):
        assert torch.equal(next(again).rows, next(batches).rows)


def test_a_loader_with_other_settings_keeps_the_rest() -> None:
    domains = {name: torch.arange(20) for name in SIZES}
    loader = MixtureLoader(domains, 12, collate=list, micro_batches=2, least=1, rank=1, world_size=2)
    other = loader.with_settings(24, least=2)
    batches = other.next_step(np.array([0.5, 0.3, 0.2]))
    assert [type(batch.rows) for batch in batches] == [list, list]
    assert (other.batch_size, other.rank, other.world_size, other.sampler.least) == (24, 1, 2, 2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_batches_are_in_the_order_of_the_mixer(together: bool, workers: int) -> None:
    """Labels alone mean what the whole batch means; in the same order nothing differs from the loader's own."""
    domains = {
        name: [{"x": torch.tensor(1000.0 * place + k)} for k in range(size)]
        for place, (name, size) in enumerate(SIZES.items())
    }

    def gradient(order: list[str], *, labels: bool) -> tuple[torch.Tensor, list[float]]:
        made = collate if together else None
        loader = MixtureLoader(
            {name: domains[name] for name in order}, 20, collate=made, micro_batches=2, num_workers=workers
        )
        learner, seen = mixer(), list[float]()
        model: Any = learner._parameters.model
        for batch, _ in zip(loader.follow(learner), range(2), strict=False):
            assert batch.names == tuple(SIZES)
            assert batch.labels.tolist() == sorted(batch.labels.tolist())
            assert (batch.rows["x"] // 1000).tolist() == batch.labels.tolist()
            assert all(
                (part.rows["x"] // 1000).unique().tolist() == [list(SIZES).index(part.domain)]
                for part in batch.by_domain()
            )
            given = (
                learner.batch(batch.labels, expected_counts=batch.expected_counts)
                if labels
                else learner.batch(batch)
            )
            with given as scope:
                scope.weighted_loss(model(batch.rows["x"].view(-1, 1)).view(-1)).backward()
            seen += batch.rows["x"].tolist()
        return model.weight.grad.clone(), seen

    expected, rows = gradient(list(SIZES), labels=False)
    assert torch.equal(gradient(list(SIZES), labels=True)[0], expected)
    reverse, turned = gradient(list(SIZES)[::-1], labels=False)
    torch.testing.assert_close(gradient(list(SIZES)[::-1], labels=True)[0], reverse)
    # Which rows of a step are in which micro-batch follows from the loader's order.
    assert sorted(turned) == sorted(rows)
    torch.testing.assert_close(reverse, expected)


def test_next_step_after_following_with_workers_has_its_own_labels() -> None:
    """Workers read ahead to the end of a round; those rows are not given, and come again."""
    loader = MixtureLoader(
        {name: torch.full((50,), place) for place, name in enumerate(SIZES)}, 10, num_workers=1
    )
    learner = mixer()
    next(iter(loader.follow(learner)))
    for weights in ([0.9] + [0.1 / (len(SIZES) - 1)] * (len(SIZES) - 1), [1 / len(SIZES)] * len(SIZES)):
        (batch,) = loader.next_step(np.array(weights))
        assert batch.rows.tolist() == batch.labels.tolist()
    loader.shutdown_workers()
