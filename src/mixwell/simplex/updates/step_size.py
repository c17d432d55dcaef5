"""The self-tuned step size of mirror descent."""

from __future__ import annotations

import math
from typing import cast, final

import numpy as np

from mixwell.simplex.updates.base import RoundContext, UpdateState
from mixwell.typing import Vector

SMALLEST_SPREAD = 1e-290
"""Scores that differ by less count as equal; their step size would not be finite."""
FACTOR = 4.0
"""The default factor of the theorem's step size."""
OUTLIER = 8.0
"""The size of one round counts in later ones as at most this many times that of every other."""
LEAST_GAIN = 0.125
"""The lower limit of the gain, reached where rounds contradict each other."""


def mirror_step_size(*, rounds: int, domains: int, size: float) -> float:
    """Return the theorems' step size of mirror descent, ``alpha = sqrt(log m / K) / size``.

    The theorems' size is ``G G_V / mu_hat``, an upper bound of every entry of the hypergradient.

    Args:
        rounds: the number K of weight updates.
        domains: the number m of domains.
        size: the size of the hypergradients; where it is 0, so is alpha.

    Example:
        >>> round(mirror_step_size(rounds=12, domains=3, size=0.5), 4)
        0.6051
    """
    if rounds < 1:
        raise ValueError(f"there must be at least 1 round, got {rounds}")
    if size <= 0:
        return 0.0
    return math.sqrt(math.log(domains) / rounds) / size


def trust(scores: Vector, noise: Vector | None) -> float:
    r"""Return the signal's fraction of a round's scores, the factor of the positive-part James-Stein estimator.

    ``max(0, 1 - (1 - 1/m) sum_j s_j^2 / sum_j (h_j - mean h)^2)`` with the standard errors ``s_j``: the expected
    squared length that pure noise would have in the simplex's tangent space, over the observed squared length.
    Scores without noise have 1; scores that noise explains have 0. The errors of the domains are assumed to be
    independent: noise that all share counts as if it moved the direction, which makes steps shorter than
        necessary.

    Args:
        scores: finite, shape ``(m,)``.
        noise: their standard errors; ``None``, where they are not known, gives 1.

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
class AutoStepSize:
    r"""A step size that follows from the hypergradients of the run and needs no setting.

    ``alpha_k = factor * gain_k * trust_k * sqrt(log m / K) / S_k``: the theorems' step size with their bound
    ``G G_V / mu_hat`` of the hypergradient replaced by the observed size,
    ``S_k = max(M_k, min(S_{k-1} / 2, 8 max(M_k, R_k)))`` with ``M_k = max_j |h_j - mean h|`` and the second
    largest size R_k of the rounds before (it too decays by half with every round), and two factors:

    - ``trust_k`` (:func:`trust`): the fraction of the scores that their standard errors do not explain.
    - ``gain_k = gain_{k-1} 2^(c trust_k trust_{k-1})`` with the cosine c of the scores of this round and of the
      last one in the simplex's tangent space, between 1/8 and 1, its initial value: rounds that contradict each
      other, as they do around the best weights, shorten the steps, rounds that agree lengthen them again
      (hypergradient descent of the learning rate, Baydin et al. 2018).

    If the number of rounds is not known, K is the number of rounds so far.

    The scores of a short last round are scaled up to a full one, so that it moves the weights proportionally
    less. No round moves a log-weight by more than ``factor * sqrt(log m / K)`` from the mean, and a large
    hypergradient of the first rounds, when the loss falls fastest, is forgotten by half with every round. (A
    running sum of squares, as in AdaGrad, never forgets it and locks in the first mixture.) A round with scores
    far larger than in all others says nothing about the size of theirs, so it counts as at most 8 times as large
    as the largest of them: however large it was, the fourth round after it takes a full step again.

    Args:
        factor: multiplies the theorem's step size.
        shrink: whether noise in the scores shortens the steps.

    References:
        Baydin, Cornish, Rubio, Schmidt, Wood 2018, Online learning rate adaptation with hypergradient descent.
    """

    def __init__(self, factor: float = FACTOR, *, shrink: bool = True) -> None:
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"the factor of the step size must be positive and finite, got {factor}")
        self.factor, self.shrink = float(factor), bool(shrink)
        self.reset()

    def reset(self) -> None:
        """Forget former hypergradients."""
        self._size, self._second, self._gain, self._trusted = 0.0, 0.0, 1.0, 1.0
        # The direction of the last round's scores, times the trust in them.
        self._last: Vector | None = None

    def next(self, scores: Vector, context: RoundContext) -> float:
        """Return alpha for this round; 0 where all scores are equal or noise explains them."""
        # Near the largest float the mean may overflow by rounding, and is limited to the range of the scores; the
        # spread may overflow too, and is limited below.
        with np.errstate(over="ignore"):
            mean = np.clip((scores / len(scores)).sum(), scores.min(), scores.max())
            spread = float(np.abs(scores - mean).max() / context.fraction)
        # Equal scores differ from their mean by rounding, which is no direction.
        rounding = 8 * float(np.finfo(np.float64).eps) * float(np.abs(scores).max()) / context.fraction
        if spread <= max(rounding, SMALLEST_SPREAD):
            self._trusted = 0.0
            return 0.0
        self._observe(min(spread, float(np.finfo(np.float64).max)))
        trusted = self._trusted = trust(scores, context.noise) if self.shrink else 1.0
        self._adapt_gain(scores, trusted)
        rounds = max(context.rounds or 0, context.round_index + 1)
        alpha = self.factor * mirror_step_size(rounds=rounds, domains=len(scores), size=self._size)
        return alpha * self._gain * trusted

    def _observe(self, spread: float) -> None:
        """Update the two largest recent sizes."""
        second = self._second / 2
        largest = min(self._size / 2, OUTLIER * max(spread, second))
        _, self._second, self._size = sorted((spread, second, largest))

    def _adapt_gain(self, scores: Vector, trusted: float) -> None:
        size = float(np.abs(scores).max())
        centered = scores / size - (scores / size).mean()
        direction = trusted * centered / float(np.linalg.norm(centered))
        if self._last is not None:
            self._gain *= 2 ** float(direction @ self._last)
            self._gain = min(max(self._gain, LEAST_GAIN), 1.0)
        self._last = direction

    def summary(self) -> dict[str, float]:
        """Return the trust in the last scores and the gain of the last step."""
        return {"trust": self._trusted, "gain": self._gain}

    def state(self) -> UpdateState:
        """Return the sizes and the direction of the recent hypergradients, and the gain."""
        last = [] if self._last is None else self._last.tolist()
        return {
            "size": self._size,
            "second": self._second,
            "gain": self._gain,
            "trusted": self._trusted,
            "last": last,
        }

    def load_state(self, state: UpdateState) -> None:
        """Restore the result of :meth:`state`."""
        numbers = cast("dict[str, float]", state)
        self._size, self._gain = float(numbers["size"]), float(numbers["gain"])
        self._second, self._trusted = float(numbers["second"]), float(numbers["trusted"])
        last = cast("list[float]", state["last"])
        self._last = np.array(last, dtype=np.float64) if last else None
