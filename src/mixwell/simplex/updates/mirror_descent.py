"""Entropic mirror descent, with a constant or a self-tuned step size."""

from __future__ import annotations

from typing import Literal, final

import numpy as np
from typing_extensions import override

from mixwell.simplex.updates.base import RoundContext, Update, UpdateState, positive_step_size
from mixwell.simplex.updates.step_size import FACTOR, AutoStepSize
from mixwell.simplex.weights import LOWEST_LOG
from mixwell.typing import Vector


def mirror_step(log: Vector, scores: Vector, step_size: float) -> Vector:
    """Take one step of entropic mirror descent, before normalization.

    ``log w_j - alpha h_j`` (the paper's update of ``w_k``), finite for any finite scores: only differences
    of scores matter, so the least one is subtracted first.

    Args:
        log: log-weights, shape ``(m,)``.
        scores: the hypergradient h, shape ``(m,)``.
        step_size: alpha, positive.

    Returns:
        Unnormalized log-weights, shape ``(m,)``.

    Example:
        >>> mirror_step(np.log([0.5, 0.5]), np.array([0.0, 1e300]), 5.0).max().round(4).item()
        -0.6931
    """
    with np.errstate(over="ignore"):
        return log - np.minimum(step_size * (scores - scores.min()), -LOWEST_LOG)


@final
class MirrorDescent(Update):
    """Entropic mirror descent, ``w_j ~ w_j exp(-alpha h_j)``.

    Args:
        step_size: the paper's alpha (its experiments use 0.5), or ``"auto"`` for an alpha that follows from the
            hypergradients of the run and needs no setting (:class:`mixwell.simplex.updates.AutoStepSize`).
        factor: multiplies an ``"auto"`` step size.
        shrink: whether noise in the scores shortens ``"auto"`` steps.

    Example:
        >>> log, alpha = MirrorDescent(0.5).step(np.log([0.5, 0.5]), np.array([1.0, -1.0]), RoundContext(0, 1))
        >>> (np.exp(log) / np.exp(log).sum()).round(4).tolist(), alpha
        ([0.2689, 0.7311], 0.5)
    """

    def __init__(
        self, step_size: float | Literal["auto"] = "auto", *, factor: float = FACTOR, shrink: bool = True
    ) -> None:
        self.step_size = step_size if step_size == "auto" else positive_step_size(step_size)
        self._auto = AutoStepSize(factor, shrink=shrink) if step_size == "auto" else None

    def __repr__(self) -> str:
        if self._auto is None:
            return f"MirrorDescent({self.step_size!r})"
        return f"MirrorDescent('auto', factor={self._auto.factor!r}, shrink={self._auto.shrink!r})"

    @override
    def step(self, log: Vector, scores: Vector, context: RoundContext) -> tuple[Vector, float]:
        alpha = self.next_step_size(scores, context)
        return (mirror_step(log, scores, alpha) if alpha > 0 else log), alpha

    def next_step_size(self, scores: Vector, context: RoundContext) -> float:
        """Return the step size of a round; ``"auto"`` also learns from its scores.

        A constant one ignores ``context.fraction``, because a short round has small scores already.
        """
        return self._auto.next(scores, context) if self._auto is not None else float(self.step_size)

    @override
    def reset(self) -> None:
        if self._auto is not None:
            self._auto.reset()

    @override
    def summary(self) -> dict[str, float]:
        """Return the trust in the last scores and the gain of the last step where the step size is ``"auto"``."""
        return {} if self._auto is None else self._auto.summary()

    @override
    def state(self) -> UpdateState:
        return {} if self._auto is None else self._auto.state()

    @override
    def load_state(self, state: UpdateState) -> None:
        if self._auto is not None:
            self._auto.load_state(state)
