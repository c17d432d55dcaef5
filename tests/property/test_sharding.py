"""However a batch is divided among ranks, it stays the batch that a single process would have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixwell import MixtureBatch
from mixwell.data.sampler import Sampler
from mixwell.data.sharding import RankBatch, shard_batch

BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def batch_of(own: RankBatch, number: int, names: list[str], *, equal: bool) -> MixtureBatch:
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


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=4), st.integers(1, 5), st.integers(1, 30))
def test_streams_of_processes_together_are_that_of_one(
    weights: list[float], processes: int, steps: int
) -> None:
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
