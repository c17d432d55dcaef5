"""Whether the scores of successive rounds agree: a signal that the weights follow, or noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.simplex.updates.step_size import trust
from mixwell.typing import Vector

MINIMUM_ROUNDS = 6
"""With fewer rounds even perfect agreement happens by chance in more than 5% of runs."""
LEVEL = 0.05
EXACT = 12
"""Up to this number of values, all sign patterns are enumerated."""
DRAWS, LARGEST = 4000, 200
"""Random sign patterns of more values, and the number of values that get signs of their own there."""
CLEAR = 0.25
"""A late agreement above this, though within chance, leaves open whether the weights have settled."""


class State(Enum):
    """What the agreement of the rounds shows."""

    TOO_FEW = "too few rounds"
    NOISE = "no common direction"
    SETTLED = "settled"
    MOVING = "moving"
    UNCLEAR = "unclear"


@final
@dataclass(frozen=True)
class Agreement:
    """The agreement of the scores of successive rounds.

    Args:
        rounds: number of rounds with scores.
        agreement: mean cosine of successive rounds; NaN with too few.
        chance: what pure noise stays below in 95% of runs.
        late_rounds: number of rounds at the end that the next two are about.
        trust: the mean fraction of the scores that their standard errors do not explain; ``None`` if unknown.
    """

    state: State
    rounds: int
    agreement: float
    chance: float
    late_rounds: int
    late_agreement: float
    late_chance: float
    trust: float | None


def measure_agreement(scores: NDArray[np.float64], noise: NDArray[np.float64] | None = None) -> Agreement:
    r"""Test whether successive rounds point in a common direction.

    The statistic is the mean over k of ``c_k``, the cosine of the scores of rounds k and k + 1 in the tangent
    space of the simplex. If the rounds are independent noise, symmetric about zero, the signs of the ``c_k`` are
    independent and fair given their sizes, so its distribution is that of ``mean_k(+-c_k)`` (Fisher's sign-flip
    test), whatever the size of the noise: it holds also where the standard errors miss a part of the noise.

    The run moves if the last half of the rounds (at least :data:`MINIMUM_ROUNDS`) agree beyond chance; has settled
    if all rounds together do and the last ones do not. If neither does, the weights follow noise or overshoot from
    the first rounds on, which the scores of one run do not tell apart.

    Args:
        scores: shape ``(rounds, m)``.
        noise: their standard errors.

    References:
        Fisher 1935, The design of experiments, section 21.
    """
    count = len(scores)
    moving = np.array([bool(np.ptp(row) > 0) for row in scores], dtype=bool)
    trusted = None
    if noise is not None and count:
        trusted = float(np.mean([trust(row, own) for row, own in zip(scores, noise, strict=True)]))
    if count < MINIMUM_ROUNDS or moving.sum() < MINIMUM_ROUNDS:
        nan = math.nan
        return Agreement(State.TOO_FEW, count, nan, nan, 0, nan, nan, trusted)
    late = max(MINIMUM_ROUNDS, count // 2)
    cosines = _cosines(scores)
    agreement, chance = float(cosines.mean()), sign_flip_limit(cosines)
    late_agreement, late_chance = float(cosines[1 - late :].mean()), sign_flip_limit(cosines[1 - late :])
    if late_agreement >= late_chance:
        state = State.MOVING
    elif agreement < chance:
        state = State.NOISE
    else:
        state = State.SETTLED if late_agreement < CLEAR else State.UNCLEAR
    return Agreement(state, count, agreement, chance, late, late_agreement, late_chance, trusted)


def _cosines(scores: NDArray[np.float64]) -> Vector:
    """Return the cosine of each round with the next, 0 where one of them has no direction."""
    size = np.abs(scores).max(axis=1, keepdims=True)
    scaled = scores / np.where(size > 0, size, 1.0)
    centered = scaled - scaled.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centered, axis=1, keepdims=True)
    unit = np.divide(centered, length, out=np.zeros_like(centered), where=length > 0)
    return np.clip((unit[1:] * unit[:-1]).sum(axis=1), -1.0, 1.0)


def sign_flip_limit(values: Vector) -> float:
    """Return the least mean that the values reach with random signs with a probability of at most :data:`LEVEL`.

    All patterns of signs of up to :data:`EXACT` values, random ones of more. Beyond the :data:`LARGEST` values the
    sum is normal. With fewer it may not be: those of the first rounds can be much larger than all others.
    """
    count, sizes = len(values), np.sort(np.abs(values))[::-1]
    if count <= EXACT:
        signs = np.array(list(product((1.0, -1.0), repeat=count)))
        sums = signs @ sizes
    else:
        random = np.random.default_rng(0)
        largest, rest = sizes[:LARGEST], sizes[LARGEST:]
        signs = 2.0 * random.integers(0, 2, size=(DRAWS, len(largest)), dtype=np.int8) - 1.0
        sums = signs @ largest
        sums += np.linalg.norm(rest) * random.normal(size=DRAWS)
    means = np.sort(sums)[::-1] / max(count, 1)
    allowed = int(LEVEL * len(means))  # patterns that may reach it
    # Equal means count together: the limit lies above the first one that too many reach.
    above = means[means > means[allowed] * (1 + 1e-12)]
    return float(above[-1]) * (1 - 1e-12) if len(above) else math.inf
