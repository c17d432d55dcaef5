"""Weights with few digits that still sum to one."""

from __future__ import annotations

import math
from collections.abc import Sequence

DIGITS = 6
"""Decimals of a weight. A learned weight is not known better than this, and people read these files."""


def shares(weights: Sequence[float]) -> list[float]:
    """Round weights to :data:`DIGITS` decimals by largest remainders, so that the decimals sum to exactly one.

    ``floor(w_i 10^d)`` units for each, and one more for those with the largest remainders until there are
    ``10^d``. None is off by a whole unit.

    Args:
        weights: not negative and not all zero; divided by their sum.

    Returns:
        The rounded weights, in the same order.

    Example:
        >>> shares([1, 1, 1])
        [0.333334, 0.333333, 0.333333]
    """
    units, total = 10**DIGITS, math.fsum(weights)
    exact = [weight / total * units for weight in weights]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in by_remainder[: units - sum(whole)]:
        whole[index] += 1
    return [number / units for number in whole]
