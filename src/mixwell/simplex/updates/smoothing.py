"""Another update, smoothed with uniform weights."""

from __future__ import annotations

import math
from typing import final

import numpy as np
from typing_extensions import override

from mixwell.simplex.updates.base import RoundContext, Update, UpdateState
from mixwell.simplex.weights import normalize
from mixwell.typing import Vector


@final
class UniformSmoothing(Update):
    """Another update, mixed with uniform weights: ``w <- (1 - epsilon) w + epsilon / m`` (DoGE, DoReMi).

    Args:
        update: the other one, which sets the step size.
        epsilon: the fraction of uniform weights.
    """

    def __init__(self, update: Update, epsilon: float) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon, the fraction of uniform weights, must be in [0, 1], got {epsilon}")
        self.update, self.epsilon = update, float(epsilon)

    def __repr__(self) -> str:
        return f"UniformSmoothing({self.update!r}, {self.epsilon!r})"

    @override
    def step(self, log: Vector, scores: Vector, context: RoundContext) -> tuple[Vector, float]:
        moved, alpha = self.update.step(log, scores, context)
        if alpha == 0 or self.epsilon == 0:
            return moved, alpha
        uniform = math.log(self.epsilon / len(log))
        if self.epsilon == 1:
            return np.full(len(log), uniform), alpha
        return np.logaddexp(math.log1p(-self.epsilon) + normalize(moved), uniform), alpha

    @override
    def reset(self) -> None:
        self.update.reset()

    @override
    def summary(self) -> dict[str, float]:
        return self.update.summary()

    @override
    def state(self) -> UpdateState:
        return self.update.state()

    @override
    def load_state(self, state: UpdateState) -> None:
        self.update.load_state(state)
