"""The rows of a batch, cut among the processes that train together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from mixwell.typing import Indices


@final
@dataclass(frozen=True)
class Cut:
    """What one of several processes has of a batch.

    Args:
        rows: indices by domain, of those that it has rows of.
        portions: by domain its rows over the mean of all processes, for :attr:`mixwell.Mixer.portions`; 0 where
            others have all rows.
        lockstep: the rows, and one that another process has of each domain of which this one has none; in the same
            order of the domains in all processes, for models that all must run equally often.
    """

    rows: dict[str, Indices]
    portions: dict[str, float]
    requires_equal_forward_passes: dict[str, Indices]


def cut(drawn: Mapping[str, Indices], *, rank: int, processes: int) -> Cut:
    """Deal the rows of a batch to the processes one by one, domain after domain.

    All processes draw the same batch, so that nothing is exchanged: the rows of all together are those that one
    process alone would have, none comes twice, and no process has more than one row more than another.

    Args:
        drawn: indices by domain, the same in all processes.
        rank: which process it is.
        processes: how many there are.

    Returns:
        What this one has.

    Raises:
        ValueError: there are fewer rows than processes.

    Example:
        >>> import numpy as np
        >>> drawn = {"web": np.array([7, 3, 5]), "code": np.array([2])}
        >>> first, second = (cut(drawn, rank=rank, processes=2) for rank in range(2))
        >>> first.rows, second.rows
        ({'web': array([7, 5])}, {'web': array([3]), 'code': array([2])})
        >>> second.portions["code"], first.portions["code"]
        (2.0, 0.0)
    """
    if processes == 1:
        return Cut(dict(drawn), {}, dict(drawn))
    total = sum(len(indices) for indices in drawn.values())
    if total < processes:
        raise ValueError(f"a batch of {total} rows cannot be cut among {processes} processes; make it larger")
    rows: dict[str, Indices] = {}
    begin = 0
    for name, indices in drawn.items():
        rows[name] = indices[(rank - begin) % processes :: processes]
        begin += len(indices)
    portions = {name: processes * len(rows[name]) / len(indices) for name, indices in drawn.items()}
    return Cut(
        {name: own for name, own in rows.items() if len(own)},
        portions,
        {name: own if len(own) else drawn[name][:1] for name, own in rows.items()},
    )
