"""Checks that ranks agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def check_weights_in_sync(weights: NDArray[np.float64], names: Sequence[str], *, round_index: int) -> None:
    """Raise a RuntimeError that names a rank with weights that differ from those of most others in any bit.

    Args:
        weights: one row for each rank, shape ``(world_size, m)``.
    """
    rows = [row.tobytes() for row in weights]
    usual = Counter(rows).most_common(1)[0][0]
    others = [rank for rank, row in enumerate(rows) if row != usual]
    if not others:
        return
    expected, found = np.frombuffer(usual), weights[others[0]]
    domain = int(np.nonzero(found != expected)[0][0])
    listed = ", ".join(map(str, others))
    raise RuntimeError(
        f"after round {round_index} the weights of process {listed} are not those of the others: "
        f"{names[domain]} is {found[domain]} in process {others[0]} and {expected[domain]} in process "
        f"{rows.index(usual)}. Give all processes the same settings and initial weights, change the weights in "
        "none of them by hand, and train a model of DistributedDataParallel or fully_shard"
    )
