"""What processes must agree on when a round ends: the same weights, and one record of what all of them saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.accumulation import LossMeans
from mixwell.mixer.nonfinite import NonFinite
from mixwell.typing import Vector

# Found by all processes at once, each of which counts them.
COMMON = ("batch", "combined gradient", "validation")


def check_weights_in_sync(
    names: Sequence[str],
    weights: Vector,
    losses: LossMeans,
    nonfinite: NonFinite,
    *,
    round_index: int,
    parameters: Parameters,
) -> None:
    """See that all processes have the same weights, and tell each what the others saw; in one exchange.

    Args:
        names: the domains.
        weights: those of this process, shape ``(m,)``.
        losses: of this process's rows; of all rows afterwards.
        nonfinite: what this process left out in the round; what all did afterwards.
        round_index: for the message.
        parameters: what is trained. Where it is spread, all processes leave out the same.

    Raises:
        RuntimeError: a process has other weights; the message names it.
    """
    if distributed.is_single_process():
        return
    told, counted = [*names, "validation"], [*names, *COMMON]
    sums = [losses.sums.get(name, (0.0, 0.0)) for name in told]
    skipped = [float(nonfinite.in_round.get(name, 0)) for name in counted]
    own = np.concatenate([weights, np.ravel(sums), skipped])
    found = distributed.all_gather_array(own, parameters.device)
    expect_same_weights(found[:, : len(names)], names, round_index=round_index)
    ends = np.cumsum([len(names), 2 * len(told)])
    totals = found[:, ends[0] : ends[1]].sum(axis=0).reshape(-1, 2)
    losses.sums = {
        name: (total, count) for name, (total, count) in zip(told, totals.tolist(), strict=True) if count
    }
    left_out = found[:, ends[1] :]
    for name, column in zip(counted, left_out.T, strict=True):
        everywhere = int(column.max() if parameters.sharded or name in COMMON else column.sum())
        before = nonfinite.total.get(name, 0) - nonfinite.in_round.get(name, 0)
        if everywhere:
            nonfinite.in_round[name] = everywhere
            nonfinite.total[name] = before + everywhere


def expect_same_weights(weights: NDArray[np.float64], names: Sequence[str], *, round_index: int) -> None:
    """Refuse weights that are not the same in all processes, to the last bit.

    Args:
        weights: one row for each process, shape ``(processes, m)``.
        names: the domains.
        round_index: for the message.

    Raises:
        RuntimeError: a process has others than most; the message names it.
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
