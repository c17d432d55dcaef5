"""However a batch is divided among ranks, it stays the batch that a single process would have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixwell import MixtureBatch
from mixwell.data.rank_batches import RankBatch, shard_batch
from mixwell.data.sampler import Sampler
from mixwell.mixer.batch import StepCounts

BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def batch_of(own: RankBatch, number: int, names: list[str], *, equal: bool = False) -> MixtureBatch:
    chosen = own.micro_batches[number]
    labels = [place for place, name in enumerate(names) for _ in chosen.get(name, ())]
    rows = {name: torch.from_numpy(chosen.get(name, np.array([-1]))) for name in names}
    return MixtureBatch(tuple(names), torch.tensor(labels, dtype=torch.int64), own.step, None, rows, equal)


@given(BATCHES, st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_shards_are_a_partition(numbers: list[int], ranks: int, micro: int, most: int, equal: bool) -> None:
    drawn = {str(place): np.arange(number) + 100 * place for place, number in enumerate(numbers)}
    if sum(numbers) < ranks * micro:
        with pytest.raises(ValueError, match="cannot be divided among"):
            shard_batch(drawn, rank=0, world_size=ranks, micro_batches=micro)
        return
    often = {"0": 0.5}
    shards = [
        shard_batch(drawn, rank=rank, world_size=ranks, micro_batches=micro, probabilities=often)
        for rank in range(ranks)
    ]
    each = [one for shard in shards for one in shard.micro_batches]
    sizes = [sum(map(len, one.values())) for one in each]
    assert max(sizes) - min(sizes) <= 1
    for name, indices in drawn.items():
        parts = [one[name] for one in each if name in one]
        assert sorted(np.concatenate(parts)) == sorted(indices)
        assert max(map(len, parts)) <= -(-len(indices) // (ranks * micro))
    # A row counts as much whatever the ranks, micro-batches and parts: R / (n p) in the mean over the ranks.
    counted = dict.fromkeys(drawn, 0.0)
    for shard in shards:
        given, passes = dict.fromkeys(drawn, 0.0), Counter[str]()
        for number in range(micro):
            batch = batch_of(shard, number, list(drawn), equal=equal)
            for part in batch.by_domain(max_rows=most):
                assert part.count is not None
                assert part.count == len(part.rows) or (equal and part.count == 0)
                assert not part.count or int(part.rows[0]) // 100 == int(part.domain)
                given[part.domain] += part.fraction
                passes[part.domain] += 1
                factor = part.fraction * part.rank_scale / part.probability
                counted[part.domain] += factor / ranks
                n, p = len(drawn[part.domain]), often.get(part.domain, 1.0)
                assert factor == pytest.approx(part.count / batch.expected_counts[part.domain])
                assert batch.expected_counts[part.domain] == pytest.approx(n * p / ranks)
                assert part.absent == (set() if equal else {d for d in drawn if not shard.step.local[d]})
        assert all(total == pytest.approx(1) for total in given.values() if total)
        assert not equal or (
            set(passes) == set(drawn) and passes == Counter(shard_passes(shards[0], most, micro))
        )
    assert counted == {name: pytest.approx(1 / often.get(name, 1.0)) for name in drawn}


def shard_passes(shard: RankBatch, most: int, micro: int) -> dict[str, int]:
    names = list(shard.step.total)
    batches = [batch_of(shard, number, names, equal=True) for number in range(micro)]
    return Counter(part.domain for one in batches for part in one.by_domain(max_rows=most))


@given(BATCHES, st.integers(1, 4), st.integers(1, 3), st.integers(1, 7))
def test_all_ranks_split_a_mixed_batch_into_the_same_number_of_parts(
    numbers: list[int], ranks: int, micro: int, most: int
) -> None:
    drawn = {str(place): np.arange(number) + 100 * place for place, number in enumerate(numbers)}
    if sum(numbers) < ranks * micro:
        return
    weights = torch.linspace(0.5, 1.5, len(numbers), dtype=torch.float64)
    losses = torch.rand(100 * len(numbers), generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def weighted_loss(batch: MixtureBatch) -> torch.Tensor:
        expected = torch.tensor([batch.expected_counts[name] for name in drawn], dtype=torch.float64)
        return ((weights / expected)[batch.labels] * losses[batch.rows]).sum()

    for number in range(micro):
        batches = [
            batch_of(shard_batch(drawn, rank=r, world_size=ranks, micro_batches=micro), number, list(drawn))
            for r in range(ranks)
        ]
        each = [batch.split(most) for batch in batches]
        assert len({len(parts) for parts in each}) == 1
        uneven = sum(numbers) % (ranks * micro) and ranks > 1
        for batch, parts in zip(batches, each, strict=True):
            sizes = [len(part) for part in parts]
            assert min(sizes) >= 1
            assert max(sizes) <= (2 if uneven and most == 1 else most)
            assert torch.equal(torch.cat([part.rows for part in parts]), batch.rows)
            assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
            assert sum(part.fraction for part in parts) == pytest.approx(batch.fraction)
            total = sum(weighted_loss(part) for part in parts)
            torch.testing.assert_close(total, weighted_loss(batch), rtol=1e-12, atol=0)
            assert [len(part) for part in batch.split(None)] == [len(batch)]


def test_rows_that_are_not_divided_evenly_cannot_be_split() -> None:
    step = StepCounts({"web": 9}, {"web": 3}, world_size=2)
    batch = MixtureBatch(("web",), torch.zeros(3, dtype=torch.int64), step, torch.arange(3))
    with pytest.raises(ValueError, match="this rank has 3 rows of a step of 9, which are not divided evenly"):
        batch.split(2)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=4), st.integers(1, 5), st.integers(1, 30))
def test_rank_streams_partition_single_stream(weights: list[float], processes: int, steps: int) -> None:
    shares = np.array(weights) / sum(weights)
    sizes = {str(place): 7 + 5 * place for place in range(len(weights))}

    def sampler() -> Sampler:
        return Sampler(sizes, 12, least=1, seed=1)

    alone, each = sampler(), [sampler() for _ in range(processes)]
    taken: dict[str, list[int]] = {name: [] for name in sizes}
    for _ in range(steps):
        expected = alone.draw(shares)
        parts = [
            shard_batch(one.draw(shares), rank=rank, world_size=processes).micro_batches[0]
            for rank, one in enumerate(each)
        ]
        for name in expected:
            own = [part[name] for part in parts if name in part]
            together = np.concatenate(own)
            assert len(together) == len(expected[name])
            assert sorted(together) == sorted(expected[name])
            taken[name] += expected[name].tolist()
    for name, size in sizes.items():
        for begin in range(0, len(taken[name]) - size + 1, size):
            assert sorted(taken[name][begin : begin + size]) == list(range(size))
