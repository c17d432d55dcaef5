"""How a hypergradient moves the weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import numpy as np

from mixwell.theory import mirror_step_size
from mixwell.weights import LOWEST_LOG, Vector

SMALLEST_SPREAD = 1e-290
"""Scores that differ by less are taken for equal; their step size would not be finite."""


def mirror_step(log: Vector, scores: Vector, step_size: float) -> Vector:
    """One step of entropic mirror descent, before normalisation.

    ``log w_j - alpha h_j`` (the paper's update of ``w_k``), finite for any finite scores: only differences
    of scores matter, so the least one is subtracted first.

    Args:
        log: log-weights, shape ``(m,)``.
        scores: the hypergradient h, shape ``(m,)``.
        step_size: alpha, positive.

    Returns:
        Unnormalised log-weights, shape ``(m,)``.

    Example:
        >>> mirror_step(np.log([0.5, 0.5]), np.array([0.0, 1e300]), 5.0).max().round(4).item()
        -0.6931
    """
    with np.errstate(over="ignore"):
        return log - np.minimum(step_size * (scores - scores.min()), -LOWEST_LOG)


class Update(ABC):
    """A rule for the step size of each round's mirror-descent step."""

    @abstractmethod
    def step_size(
        self, scores: Vector, *, round_index: int, rounds: int | None, fraction: float = 1.0
    ) -> float:
        """The step size alpha of this round.

        Args:
            scores: the hypergradient of this round, finite, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon; below one for a short last round.

        Returns:
            alpha >= 0.
        """

    def reset(self) -> None:
        """A run begins; forget what was seen before."""

    def state(self) -> dict[str, float]:
        """What a resumed run needs to know."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: its numbers.
        """


@final
class MirrorDescent(Update):
    """Mirror descent with a given, constant step size (the paper's experiments use 0.5).

    Args:
        alpha: the paper's alpha.

    Raises:
        ValueError: alpha is not positive and finite.
    """

    def __init__(self, alpha: float) -> None:
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"the step size of the weights must be positive and finite, got {alpha}")
        self.alpha = float(alpha)

    def __repr__(self) -> str:
        return f"MirrorDescent({self.alpha!r})"

    def step_size(
        self, scores: Vector, *, round_index: int, rounds: int | None, fraction: float = 1.0
    ) -> float:
        """The given step size.

        Args:
            scores: not used.
            round_index: not used.
            rounds: not used.
            fraction: not used; a short round has small scores already.

        Returns:
            alpha.
        """
        return self.alpha


@final
class SelfTunedMirrorDescent(Update):
    r"""Mirror descent whose step size follows from the hypergradients seen; it needs no setting.

    ``alpha_k = factor * sqrt(log m / K) / S_k``, the theorems' step size with their bound ``G G_V / mu_hat``
    of the hypergradient replaced by the size that is seen,
    ``S_k = max(M_k, S_{k-1} / 2)`` with ``M_k = max_j |h_j - mean h|``. With an unknown number of rounds K is
    the number of rounds so far.

    The scores of a short last round are taken for a whole one's, so that it moves the weights proportionally
    less. No round moves a log-weight by more than ``factor * sqrt(log m / K)`` from the mean, and a large
    hypergradient of the first rounds, when the loss falls fastest, is forgotten by half with every round. (A
    running sum of squares, as in AdaGrad, never forgets it and locks in the first mixture.)

    Args:
        factor: multiplies the theorem's step size.

    Raises:
        ValueError: the factor is not positive and finite.
    """

    def __init__(self, factor: float = 2.0) -> None:
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"the factor of the step size must be positive and finite, got {factor}")
        self.factor = float(factor)
        self._size = 0.0

    def __repr__(self) -> str:
        return f"SelfTunedMirrorDescent({self.factor!r})"

    def reset(self) -> None:
        """Forget the size of former hypergradients."""
        self._size = 0.0

    def step_size(
        self, scores: Vector, *, round_index: int, rounds: int | None, fraction: float = 1.0
    ) -> float:
        """The step size that fits this round's hypergradient and the recent ones.

        Args:
            scores: the hypergradient, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon.

        Returns:
            alpha, 0 where all scores are equal.
        """
        # Scores near the largest float: the mean must not overflow, the spread may and is then cut.
        with np.errstate(over="ignore"):
            spread = float(np.abs(scores - (scores / len(scores)).sum()).max() / fraction)
        # Equal scores differ from their mean by rounding, which must not be taken for a direction.
        rounding = 8 * float(np.finfo(np.float64).eps) * float(np.abs(scores).max()) / fraction
        if spread <= max(rounding, SMALLEST_SPREAD):
            return 0.0
        self._size = max(min(spread, float(np.finfo(np.float64).max)), self._size / 2)
        count = max(rounds or 0, round_index + 1)
        return self.factor * mirror_step_size(rounds=count, domains=len(scores), size=self._size)

    def state(self) -> dict[str, float]:
        """The size of the recent hypergradients."""
        return {"size": self._size}

    def load_state(self, state: dict[str, float]) -> None:
        """Take up the size of the recent hypergradients.

        Args:
            state: what :meth:`state` gave.
        """
        self._size = float(state["size"])


def resolve(update: Update | float | None) -> Update:
    """The update that a setting means.

    Args:
        update: a rule, a number (the alpha of :class:`MirrorDescent`), or ``None`` for
            :class:`SelfTunedMirrorDescent`.

    Returns:
        The rule.
    """
    if update is None:
        return SelfTunedMirrorDescent()
    return update if isinstance(update, Update) else MirrorDescent(update)
