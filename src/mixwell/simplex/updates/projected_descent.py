"""Projected gradient descent on the simplex."""

from __future__ import annotations

from typing import final

import numpy as np
from typing_extensions import override

from mixwell.simplex.updates.base import RoundContext, Update, positive_step_size
from mixwell.simplex.weights import TINY, normalize
from mixwell.typing import Vector

LONGEST_STEP = 1e6
"""A longer step in any direction ends at the same vertex of the simplex."""


@final
class ProjectedDescent(Update):
    """Projected gradient descent, ``w <- Proj(w - eta h)``, the nearest point of the simplex (TANDEM).

    Args:
        step_size: eta.

    Example:
        >>> log, _ = ProjectedDescent(0.1).step(np.log([0.5, 0.5]), np.array([1.0, -1.0]), RoundContext(0, 1))
        >>> np.exp(log).round(3).tolist()
        [0.4, 0.6]
    """

    def __init__(self, step_size: float) -> None:
        self.step_size = positive_step_size(step_size)

    def __repr__(self) -> str:
        return f"ProjectedDescent({self.step_size!r})"

    @override
    def step(self, log: Vector, scores: Vector, context: RoundContext) -> tuple[Vector, float]:
        with np.errstate(over="ignore"):
            change = np.minimum(self.step_size * (scores - scores.min()), LONGEST_STEP)
        return np.log(np.maximum(_nearest(np.exp(normalize(log)) - change), TINY)), self.step_size


def _nearest(point: Vector) -> Vector:
    """Return the nearest point of the simplex: ``max(0, x_j - t)`` with the t for which they sum to one."""
    falling = np.sort(point)[::-1]
    shifts = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    return np.maximum(point - shifts[np.flatnonzero(falling > shifts)[-1]], 0)
