"""However a batch is cut among processes, it stays the batch that one process would have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixwell.data.sampler import Sampler
from mixwell.data.sharding import cut

BATCHES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(BATCHES, st.integers(1, 9))
def test_a_cut_is_a_partition(numbers: list[int], processes: int) -> None:
    drawn = {str(place): np.arange(number) + 100 * place for place, number in enumerate(numbers)}
    if sum(numbers) < processes:
        with pytest.raises(ValueError, match="cannot be cut among"):
            cut(drawn, rank=0, processes=processes)
        return
    cuts = [cut(drawn, rank=rank, processes=processes) for rank in range(processes)]
    sizes = [sum(map(len, one.rows.values())) for one in cuts]
    assert max(sizes) - min(sizes) <= 1
    for name, indices in drawn.items():
        parts = [one.rows[name] for one in cuts if name in one.rows]
        assert sorted(np.concatenate(parts)) == sorted(indices)
        assert max(map(len, parts)) <= -(-len(indices) // processes)
        if processes > 1:
            assert sum(one.portions[name] for one in cuts) == pytest.approx(processes)
        for one in cuts:
            assert list(one.requires_equal_forward_passes) == list(drawn)
            assert len(one.requires_equal_forward_passes[name]) >= 1


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
        parts = [cut(one.draw(shares), rank=rank, processes=processes) for rank, one in enumerate(each)]
        for name in expected:
            own = [part.rows[name] for part in parts if name in part.rows]
            together = np.concatenate(own)
            assert len(together) == len(expected[name])
            assert sorted(together) == sorted(expected[name])
            taken[name] += expected[name].tolist()
    for name, size in sizes.items():
        for begin in range(0, len(taken[name]) - size + 1, size):
            assert sorted(taken[name][begin : begin + size]) == list(range(size))
