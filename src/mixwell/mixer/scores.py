"""The mean losses of a round, and the scores at its validation points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from torch import Tensor

from mixwell.typing import Vector


@final
class LossMeans:
    """The means of the losses that were recorded in a round, by domain."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        """By domain the sum of fraction times loss, and the sum of fractions."""

    def add(self, name: str, loss: Tensor | float | None, fraction: float) -> None:
        """Add the loss of a fraction of a batch, if it was recorded."""
        if loss is not None:
            total, count = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + fraction * float(loss), count + fraction)

    def means(self) -> dict[str, float]:
        """Return the mean loss of every domain that has one."""
        return {name: total / count for name, (total, count) in self.sums.items()}


@final
class RoundScores:
    """The scores at the validation points of a round, their mean and its standard error."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Vector]] = []
        """The number of steps that a point looks back over, and its scores, shape ``(m,)``."""
        self.parts: list[tuple[float, Vector]] = []

    def add(self, step: int, scores: Vector) -> None:
        """Add a point that looks back over ``step`` >= 1 steps, with finite scores, shape ``(m,)``."""
        self.points.append((step, scores))

    def add_part(self, fraction: float, scores: Vector) -> None:
        """Add the scores of a part of the only point's batch, from which the noise of that batch is estimated."""
        self.parts.append((fraction, scores))

    def mean(self) -> Vector | None:
        """Return the mean over the points, shape ``(m,)``; ``None`` where there are none."""
        if not self.points:
            return None
        # Divide first, so that finite scores have a finite mean.
        return np.sum([scores / len(self.points) for _, scores in self.points], axis=0)

    def standard_errors(self) -> Vector | None:
        """Return the standard error of the mean score of every domain.

        Scores grow in proportion to the number of steps that the traces look back over, so the noise of k points
        after ``t_i`` steps is what remains without that growth, ``r_i = h_i - t_i sum h / sum t``, and the
        standard error is ``sqrt(sum_i r_i^2 / (k (k - 1)))``. It contains the noise of the iterates and of the
        validation batches, not that of the traces, which the points share. For one point that was computed in k
        parts with fractions ``s_i`` it is ``sqrt(k / (k - 1) * sum_i s_i^2 (h_i - h)^2)``, the noise of its batch
        only.

        Returns:
            Shape ``(m,)``; ``None`` where there are no two points or parts, or they are too large.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if len(self.points) > 1:
                steps = np.array([[float(step)] for step, _ in self.points])
                scores = np.stack([one for _, one in self.points])
                left = scores - steps * (scores.sum(axis=0) / steps.sum())
                variance = (left**2).sum(axis=0) / (len(scores) * (len(scores) - 1))
            elif self.points and len(self.parts) > 1:
                fractions = np.array([[fraction] for fraction, _ in self.parts])
                scores = np.stack([one for _, one in self.parts])
                mean = (fractions * scores).sum(axis=0) / fractions.sum()
                variance = (fractions**2 * (scores - mean) ** 2).sum(axis=0) * len(scores) / (len(scores) - 1)
            else:
                return None
        return np.sqrt(variance) if np.isfinite(variance).all() else None

    def state(self) -> list[tuple[int, list[float]]]:
        """Return the points as plain values."""
        return [(step, scores.tolist()) for step, scores in self.points]

    def load_state(self, state: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Restore the result of :meth:`state`."""
        self.points = [(int(step), np.array(scores, dtype=np.float64)) for step, scores in state]
