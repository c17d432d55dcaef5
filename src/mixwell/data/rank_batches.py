"""The rows of a step, dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from mixwell.mixer.batch import StepCounts
from mixwell.typing import Indices


@final
@dataclass(frozen=True)
class RankBatch:
    """The rows of a step on one rank.

    Args:
        micro_batches: for each the indices of its rows by domain, in the order of the domains.
        step: the number of rows of each domain.
    """

    micro_batches: list[dict[str, Indices]]
    step: StepCounts


def shard_batch(
    drawn: Mapping[str, Indices],
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_batches: int = 1,
    probabilities: Mapping[str, float] | None = None,
) -> RankBatch:
    """Deal the rows of a step to ranks and micro-batches one by one, domain after domain.

    All ranks draw the same rows, so that nothing is exchanged: those of all together are the rows that a single
    process would have, none comes twice, and no rank or micro-batch has more than one row more than another.

    Args:
        drawn: indices by domain, the same on all ranks.
        probabilities: the probability with which a domain is in a step, of those that may be absent.

    Raises:
        ValueError: there are fewer rows than ranks and micro-batches.

    Example:
        >>> import numpy as np
        >>> drawn = {"web": np.array([7, 3, 5]), "code": np.array([2])}
        >>> first, second = (shard_batch(drawn, rank=rank, world_size=2) for rank in range(2))
        >>> first.micro_batches, second.micro_batches
        ([{'web': array([7, 5])}], [{'web': array([3]), 'code': array([2])}])
        >>> first.step.expected
        {'web': 1.5, 'code': 0.5}
    """
    total, shards = sum(len(indices) for indices in drawn.values()), world_size * micro_batches
    if total < shards:
        each = "" if micro_batches == 1 else f" and {micro_batches} micro-batches"
        raise ValueError(
            f"a batch of {total} rows cannot be divided among {world_size} ranks{each}; make it larger"
        )
    found: list[dict[str, Indices]] = []
    for number in range(micro_batches):
        own, begin = dict[str, Indices](), 0
        for name, indices in drawn.items():
            own[name] = indices[(number * world_size + rank - begin) % shards :: shards]
            begin += len(indices)
        found.append({name: indices for name, indices in own.items() if len(indices)})
    local = {name: sum(len(own.get(name, ())) for own in found) for name in drawn}
    counts = {name: len(indices) for name, indices in drawn.items()}
    return RankBatch(found, StepCounts(counts, local, dict(probabilities or {}), world_size, micro_batches))
