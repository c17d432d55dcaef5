"""The KL projection onto a simplex with bounds."""

from __future__ import annotations

import numpy as np

from mixwell.simplex.weights import LOWEST_LOG, TINY, normalize
from mixwell.typing import Vector


def project(log: Vector, low: Vector, high: Vector) -> Vector:
    """Project onto ``{low <= w <= high, sum w = 1}`` in KL divergence: ``w_j = clip(s q_j, low_j, high_j)``.

    As s grows from zero, each domain leaves its floor at one value of ``log s`` and reaches its cap at another.
    These 2m events are visited in order; the last one at which the clipped sum does not exceed one determines
    which domains are at which bound, and the free ones share the rest in proportion. The order of events
    separates the domains, not sums of logarithms, which cancel where log-weights differ by 1e300.

    Args:
        log: log-weights ``log q``, shape ``(m,)``; ``-inf`` for a weight of zero.
        low: the least weights, summing to at most one, shape ``(m,)``.
        high: the greatest weights, summing to at least one, shape ``(m,)``.

    Returns:
        Log-weights, shape ``(m,)``; ``-inf`` where ``high`` is zero.
    """
    m = len(log)
    if not low.any() and (high == 1).all():
        return log
    log = np.maximum(log, LOWEST_LOG)
    with np.errstate(divide="ignore"):
        log_low, log_high = np.log(low), np.log(high)
    events = np.concatenate([log_low - log, log_high - log])
    order = np.argsort(events, kind="stable")
    rank = np.empty(2 * m, dtype=np.int64)
    rank[order] = np.arange(2 * m)
    leaves_floor, meets_cap = rank[:m], rank[m:]
    at_event = np.arange(2 * m)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.clip(np.exp(np.clip(log + events[order][:, None], log_low, log_high)), low, high)
    totals = np.where(leaves_floor >= at_event, low, np.where(meets_cap <= at_event, high, grown)).sum(axis=1)
    below = np.flatnonzero(totals <= 1)
    last = int(below[-1]) if below.size else -1
    while True:
        at_low, at_high = leaves_floor > last, meets_cap <= last
        free = ~(at_low | at_high)
        rest = 1 - low[at_low].sum() - high[at_high].sum()
        if last < 0 or not free.any() or rest >= grown[last, free].sum() * (1 - 1e-9):
            break
        last -= 1  # rounding lost the free weights in a sum near 1, so the cap is not quite reached
    result = np.where(at_low, log_low, log_high)
    if free.any():
        result[free] = normalize(log[free]) + np.log(max(rest, TINY))
    result = np.clip(result, log_low, log_high)
    missing = 1 - np.exp(result).sum()
    return result if abs(missing) < 1e-9 else _fill(np.exp(result), log, low, high)


def _fill(weights: Vector, log: Vector, low: Vector, high: Vector) -> Vector:
    """Add missing weight to the greatest log-weights first (or remove excess weight from the least).

    Only log-weights of 1e16 and beyond, for which rounding has blurred the order of events, need it; in that limit
    the projection does just this.
    """
    missing = 1 - weights.sum()
    for j in np.argsort(-log if missing > 0 else log, kind="stable"):
        change = np.clip(missing, low[j] - weights[j], high[j] - weights[j])
        weights[j] += change
        missing -= change
    with np.errstate(divide="ignore"):
        return np.log(weights)
