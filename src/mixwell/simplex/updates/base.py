"""The interface of all updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from mixwell.typing import Vector

UpdateState = dict[str, float | list[float]]
"""The state of an update, as plain values."""


@final
@dataclass(frozen=True, eq=False)
class RoundContext:
    """The facts about a round, other than its scores, that an update may use.

    Args:
        round_index: counts from 0.
        rounds: the number of rounds of the run, if it is known.
        fraction: the length of this round over the horizon, at most one; below one for a short last round.
        noise: the standard errors of the scores, if they are known, shape ``(m,)``.
    """

    round_index: int
    rounds: int | None
    fraction: float = 1.0
    noise: Vector | None = None


class Update(ABC):
    """A rule by which the scores of a round move the weights."""

    @abstractmethod
    def step(self, log: Vector, scores: Vector, context: RoundContext) -> tuple[Vector, float]:
        """Return the weights after a round and the step size that was taken.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: finite, shape ``(m,)``; the weights move against them.

        Returns:
            Log-weights that need not be normalized, shape ``(m,)``, and a step size; with a step size of 0 the
            weights are unchanged.
        """

    def reset(self) -> None:
        """Forget the rounds of a former run."""

    def summary(self) -> dict[str, float]:
        """Return numbers about the last step for the round's record."""
        return {}

    def state(self) -> UpdateState:
        """Return what a resumed run needs."""
        return {}

    def load_state(self, state: UpdateState) -> None:
        """Restore the result of :meth:`state`."""


def positive_step_size(value: float) -> float:
    """Return a step size of the weights as a float, or raise a ValueError."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"the step size of the weights must be positive and finite, got {value}")
    return float(value)
