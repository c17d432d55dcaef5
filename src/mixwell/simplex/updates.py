"""How the scores of a round move the weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import cast, final

import numpy as np

from mixwell.simplex.formulas import mirror_step_size
from mixwell.simplex.weights import LOWEST_LOG, TINY, normalize
from mixwell.typing import Vector

SMALLEST_SPREAD = 1e-290
"""Scores that differ by less are taken for equal; their step size would not be finite."""


FACTOR = 4.0
"""Of the self-tuned step size."""
LEAST_GAIN = 0.125
"""Of the self-tuned step size, where rounds contradict each other."""
UpdateState = dict[str, float | list[float]]
"""What an update remembers, as plain values."""

FURTHEST = 1e6
"""A step in any direction that is longer ends at the same vertex of the simplex."""


def mirror_step(log: Vector, scores: Vector, step_size: float) -> Vector:
    """One step of entropic mirror descent, before normalization.

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


class Update(ABC):
    """A rule by which the scores of a round move the weights."""

    @abstractmethod
    def move(
        self,
        log: Vector,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> tuple[Vector, float]:
        """The weights after a round.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: of the round, finite, shape ``(m,)``; the weights move against them.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon; below one for a short last round.
            noise: the standard errors of the scores, where they are known, shape ``(m,)``.

        Returns:
            Log-weights that need not be normalized, shape ``(m,)``, and the step size that was taken; with a step
            size of 0 the weights are as they were.
        """

    def reset(self) -> None:
        """A run begins; forget what was seen before."""

    def summary(self) -> dict[str, float]:
        """Numbers of the last move for the round's record."""
        return {}

    def state(self) -> UpdateState:
        """What a resumed run needs to know."""
        return {}

    def load_state(self, state: UpdateState) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: its numbers.
        """


class MirrorUpdate(Update):
    """Entropic mirror descent, ``w_j ~ w_j exp(-alpha h_j)``; a rule for alpha is left to choose."""

    def move(
        self,
        log: Vector,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> tuple[Vector, float]:
        """One step of mirror descent.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: of the round, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon.
            noise: the standard errors of the scores, where they are known.

        Returns:
            Log-weights, shape ``(m,)``, and alpha.
        """
        alpha = self.step_size(scores, round_index=round_index, rounds=rounds, fraction=fraction, noise=noise)
        return (mirror_step(log, scores, alpha) if alpha > 0 else log), alpha

    @abstractmethod
    def step_size(
        self,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> float:
        """The step size alpha of this round.

        Args:
            scores: the hypergradient of this round, finite, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon; below one for a short last round.
            noise: the standard errors of the scores, where they are known, shape ``(m,)``.

        Returns:
            alpha >= 0.
        """


@final
class MirrorDescent(MirrorUpdate):
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
        self,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> float:
        """The given step size.

        Args:
            scores: not used.
            round_index: not used.
            rounds: not used.
            fraction: not used; a short round has small scores already.
            noise: not used.

        Returns:
            alpha.
        """
        return self.alpha


def trust(scores: Vector, noise: Vector | None) -> float:
    r"""The part of a round's scores that is signal: the factor of the positive-part James-Stein estimator.

    ``max(0, 1 - (1 - 1/m) sum_j s_j^2 / sum_j (h_j - mean h)^2)`` with the standard errors ``s_j``: the expected
    squared length of what noise alone would leave in the simplex's tangent space, over the squared length that is
    there. Scores without noise have 1; scores that noise explains have 0. The errors of the domains are taken for
    independent: noise that all share counts as if it moved the direction, which makes steps shorter than need be.

    Args:
        scores: of a round, finite, shape ``(m,)``.
        noise: their standard errors; ``None`` where they are not known.

    Returns:
        In [0, 1]; 1 where the noise is not known.

    Example:
        >>> trust(np.array([1.0, -1.0]), np.array([0.0, 0.0])), trust(np.array([0.1, -0.1]), np.array([1.0, 1.0]))
        (1.0, 0.0)
    """
    if noise is None:
        return 1.0
    size = float(np.abs(scores).max())
    if size < SMALLEST_SPREAD:
        return 0.0
    # In units of the largest score, so that nothing overflows.
    centered = scores / size - (scores / size).mean()
    length = float((centered**2).sum())
    if length == 0:
        return 0.0
    with np.errstate(over="ignore"):
        explained = (1 - 1 / len(scores)) * float(((noise / size) ** 2).sum())
    return max(0.0, 1.0 - explained / length)


@final
class SelfTunedMirrorDescent(MirrorUpdate):
    r"""Mirror descent whose step size follows from the hypergradients seen; it needs no setting.

    ``alpha_k = factor * gain_k * trust_k * sqrt(log m / K) / S_k``: the theorems' step size with their bound
    ``G G_V / mu_hat`` of the hypergradient replaced by the size that is seen,
    ``S_k = max(M_k, S_{k-1} / 2)`` with ``M_k = max_j |h_j - mean h|``, and two factors:

    - ``trust_k`` (:func:`trust`): the part of the scores that is not explained by their standard errors.
    - ``gain_k = gain_{k-1} 2^(c trust_k trust_{k-1})`` with the cosine c of the scores of this round and of the
      last one in the simplex's tangent space, between 1/8 and 1, which it begins with: rounds that contradict each
      other, as they do around the best weights, shorten the steps, rounds that agree lengthen them again
      (hypergradient descent of the learning rate, Baydin et al. 2018).

    With an unknown number of rounds K is the number of rounds so far.

    The scores of a short last round are taken for a whole one's, so that it moves the weights proportionally
    less. No round moves a log-weight by more than ``factor * sqrt(log m / K)`` from the mean, and a large
    hypergradient of the first rounds, when the loss falls fastest, is forgotten by half with every round. (A
    running sum of squares, as in AdaGrad, never forgets it and locks in the first mixture.)

    Args:
        factor: multiplies the theorem's step size.
        shrink: whether steps are shortened by the noise of the scores.

    Raises:
        ValueError: the factor is not positive and finite.

    References:
        Baydin, Cornish, Rubio, Schmidt, Wood 2018, Online learning rate adaptation with hypergradient descent.
    """

    def __init__(self, factor: float = FACTOR, *, shrink: bool = True) -> None:
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"the factor of the step size must be positive and finite, got {factor}")
        self.factor, self.shrink = float(factor), bool(shrink)
        self.reset()

    def __repr__(self) -> str:
        return f"SelfTunedMirrorDescent({self.factor!r}, shrink={self.shrink!r})"

    def reset(self) -> None:
        """Forget former hypergradients."""
        self._size, self._gain, self._trusted = 0.0, 1.0, 1.0
        # The direction of the last round's scores, times the trust in them.
        self._last: Vector | None = None

    def step_size(
        self,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> float:
        """The step size that fits this round's hypergradient and the recent ones.

        Args:
            scores: the hypergradient, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon.
            noise: the standard errors of the scores, where they are known.

        Returns:
            alpha, 0 where all scores are equal or noise explains them.
        """
        # Scores near the largest float: the mean must not overflow, the spread may and is then cut.
        with np.errstate(over="ignore"):
            spread = float(np.abs(scores - (scores / len(scores)).sum()).max() / fraction)
        # Equal scores differ from their mean by rounding, which must not be taken for a direction.
        rounding = 8 * float(np.finfo(np.float64).eps) * float(np.abs(scores).max()) / fraction
        if spread <= max(rounding, SMALLEST_SPREAD):
            self._trusted = 0.0
            return 0.0
        self._size = max(min(spread, float(np.finfo(np.float64).max)), self._size / 2)
        trusted = self._trusted = trust(scores, noise) if self.shrink else 1.0
        self._adapt(scores, trusted)
        count = max(rounds or 0, round_index + 1)
        alpha = self.factor * mirror_step_size(rounds=count, domains=len(scores), size=self._size)
        return alpha * self._gain * trusted

    def _adapt(self, scores: Vector, trusted: float) -> None:
        size = float(np.abs(scores).max())
        centered = scores / size - (scores / size).mean()
        direction = trusted * centered / float(np.linalg.norm(centered))
        if self._last is not None:
            self._gain *= 2 ** float(direction @ self._last)
            self._gain = min(max(self._gain, LEAST_GAIN), 1.0)
        self._last = direction

    def summary(self) -> dict[str, float]:
        """The trust in the last scores and the gain of the last step."""
        return {"trust": self._trusted, "gain": self._gain}

    def state(self) -> UpdateState:
        """The size and the direction of the recent hypergradients, and the gain."""
        last = [] if self._last is None else self._last.tolist()
        return {"size": self._size, "gain": self._gain, "trusted": self._trusted, "last": last}

    def load_state(self, state: UpdateState) -> None:
        """Take up size, direction and gain.

        Args:
            state: what :meth:`state` gave.
        """
        self._size, self._gain = float(cast("float", state["size"])), float(cast("float", state["gain"]))
        self._trusted = float(cast("float", state["trusted"]))
        last = cast("list[float]", state["last"])
        self._last = np.array(last, dtype=np.float64) if last else None


@final
class ProjectedDescent(Update):
    """Projected gradient descent, ``w <- Proj(w - eta h)``, the nearest point of the simplex (TANDEM).

    Args:
        step_size: eta.

    Raises:
        ValueError: the step size is not positive and finite.

    Example:
        >>> log, _ = ProjectedDescent(0.1).move(np.log([0.5, 0.5]), np.array([1.0, -1.0]), round_index=0, rounds=1)
        >>> np.exp(log).round(3).tolist()
        [0.4, 0.6]
    """

    def __init__(self, step_size: float) -> None:
        if not (math.isfinite(step_size) and step_size > 0):
            raise ValueError(f"the step size of the weights must be positive and finite, got {step_size}")
        self.eta = float(step_size)

    def __repr__(self) -> str:
        return f"ProjectedDescent({self.eta!r})"

    def move(
        self,
        log: Vector,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> tuple[Vector, float]:
        """One step, and back to the simplex.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: of the round, shape ``(m,)``.
            round_index: not used.
            rounds: not used.
            fraction: not used.
            noise: not used.

        Returns:
            Log-weights, shape ``(m,)``, and eta.
        """
        with np.errstate(over="ignore"):
            moved = np.exp(normalize(log)) - np.minimum(self.eta * (scores - scores.min()), FURTHEST)
        return np.log(np.maximum(_nearest(moved), TINY)), self.eta


@final
class SoftmaxWeights(Update):
    """The signal says where the weights go: ``w_j ~ exp(-h_j)``, whatever they were.

    Args:
        memory: the share of the old weights that stays, ``w <- memory w + (1 - memory) softmax(-h)``.

    Raises:
        ValueError: the memory is not in [0, 1).

    Example:
        >>> log, _ = SoftmaxWeights().move(np.log([0.9, 0.1]), -np.log([1.0, 3.0]), round_index=0, rounds=1)
        >>> np.exp(normalize(log)).round(4).tolist()
        [0.25, 0.75]
    """

    def __init__(self, memory: float = 0.0) -> None:
        if not 0 <= memory < 1:
            raise ValueError(f"the memory of the weights must be in [0, 1), got {memory}")
        self.memory = float(memory)

    def __repr__(self) -> str:
        return f"SoftmaxWeights({self.memory!r})"

    def move(
        self,
        log: Vector,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> tuple[Vector, float]:
        """The weights that the scores say.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: of the round, shape ``(m,)``.
            round_index: not used.
            rounds: not used.
            fraction: not used.
            noise: not used.

        Returns:
            Log-weights, shape ``(m,)``, and 1.
        """
        new = normalize(mirror_step(np.zeros_like(scores), scores, 1.0))
        if self.memory:
            new = np.log(self.memory * np.exp(normalize(log)) + (1 - self.memory) * np.exp(new))
        return new, 1.0


@final
class UniformSmoothing(Update):
    """Another update, then a share of uniform weights: ``w <- (1 - c) w + c / m`` (DoGE, DoReMi).

    Args:
        update: the other one.
        share: c.

    Raises:
        ValueError: the share is not in [0, 1].
    """

    def __init__(self, update: Update, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"the share of uniform weights must be in [0, 1], got {share}")
        self.update, self.share = update, float(share)

    def __repr__(self) -> str:
        return f"UniformSmoothing({self.update!r}, {self.share!r})"

    def reset(self) -> None:
        """A run begins."""
        self.update.reset()

    def move(
        self,
        log: Vector,
        scores: Vector,
        *,
        round_index: int,
        rounds: int | None,
        fraction: float = 1.0,
        noise: Vector | None = None,
    ) -> tuple[Vector, float]:
        """Move, then mix with uniform weights.

        Args:
            log: the log-weights of the round, shape ``(m,)``.
            scores: of the round, shape ``(m,)``.
            round_index: the number of this round, from 0.
            rounds: how many rounds the run has, if that is known.
            fraction: the length of this round over the horizon.
            noise: the standard errors of the scores, where they are known.

        Returns:
            Log-weights, shape ``(m,)``, and the step size of the other update.
        """
        moved, alpha = self.update.move(
            log, scores, round_index=round_index, rounds=rounds, fraction=fraction, noise=noise
        )
        if alpha == 0 or self.share == 0:
            return moved, alpha
        return np.logaddexp(
            math.log1p(-self.share) + normalize(moved) if self.share < 1 else np.full(len(log), -np.inf),
            math.log(self.share / len(log)),
        ), alpha

    def summary(self) -> dict[str, float]:
        """Those of the other update."""
        return self.update.summary()

    def state(self) -> UpdateState:
        """What the other update remembers."""
        return self.update.state()

    def load_state(self, state: UpdateState) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: its numbers.
        """
        self.update.load_state(state)


def _nearest(point: Vector) -> Vector:
    """The nearest point of the simplex: ``max(0, x_j - t)`` with the t for which they sum to one."""
    falling = np.sort(point)[::-1]
    shifts = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    return np.maximum(point - shifts[np.flatnonzero(falling > shifts)[-1]], 0)


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
