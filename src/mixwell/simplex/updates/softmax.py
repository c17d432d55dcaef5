"""Weights that are a function of the scores of the round."""

from __future__ import annotations

from typing import final

import numpy as np
from typing_extensions import override

from mixwell.simplex.updates.base import RoundContext, Update
from mixwell.simplex.updates.mirror_descent import mirror_step
from mixwell.simplex.weights import normalize
from mixwell.typing import Vector


@final
class SoftmaxWeights(Update):
    """The softmax of the negative scores, ``w_j ~ exp(-h_j)``, whatever the weights were. The step size is 1.

    Args:
        ema: the decay of an exponential moving average, ``w <- ema w + (1 - ema) softmax(-h)``.

    Example:
        >>> log, _ = SoftmaxWeights().step(np.log([0.9, 0.1]), -np.log([1.0, 3.0]), RoundContext(0, 1))
        >>> np.exp(normalize(log)).round(4).tolist()
        [0.25, 0.75]
    """

    def __init__(self, ema: float = 0.0) -> None:
        if not 0 <= ema < 1:
            raise ValueError(f"the decay of the weights' moving average must be in [0, 1), got {ema}")
        self.ema = float(ema)

    def __repr__(self) -> str:
        return f"SoftmaxWeights({self.ema!r})"

    @override
    def step(self, log: Vector, scores: Vector, context: RoundContext) -> tuple[Vector, float]:
        new = normalize(mirror_step(np.zeros_like(scores), scores, 1.0))
        if self.ema:
            new = np.log(self.ema * np.exp(normalize(log)) + (1 - self.ema) * np.exp(new))
        return new, 1.0
