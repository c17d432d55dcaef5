"""Grades of an estimated direction: its cosine with the right one, and how often chance is as good."""

from __future__ import annotations

import math
from enum import Enum

import numpy as np

GOOD, FAIR = 0.8, 0.4
"""The least cosines of a direction that is called right, and roughly right."""
CHANCE = 0.05
"""A cosine that random directions reach more often shows nothing."""
SIZE = 0.25
"""A relative error of the differences between domains below which size and direction agree."""
ENOUGH = 6
"""The least number of replicates of two domains that agree by chance in less than :data:`CHANCE` of cases."""
NO_DIRECTION = (
    "there is no direction to compare (all domains are equal, or a loss is not finite): measure over more steps, "
    "or from an earlier checkpoint, where the learning rate is not zero"
)
_DRAWS = 20_000


class Grade(Enum):
    """How far a hypergradient can be trusted, from the best to the worst."""

    GOOD = "good"
    USABLE = "usable"
    NOT_MEASURED = "not measured"
    DO_NOT_TRUST = "do not trust"


def graded(cosine: float, chance: float) -> Grade:
    """Return the grade of a cosine that chance alone reaches with a probability of ``chance``."""
    if math.isnan(cosine):
        return Grade.NOT_MEASURED
    if cosine < FAIR:
        return Grade.DO_NOT_TRUST
    return Grade.GOOD if cosine >= GOOD and chance <= CHANCE else Grade.USABLE


def chance_of_cosine(cosine: float, domains: int, count: int = 1) -> float:
    """Return the probability that ``count`` random directions have at least this mean cosine with a fixed one.

    Directions are uniform on the sphere of the ``domains - 1`` dimensions in which weights can move; with two
    domains they are a sign, right by chance in half of the cases. From :data:`_DRAWS` simulated draws.

    Example:
        >>> round(chance_of_cosine(1.0, 2), 1), round(chance_of_cosine(1.0, 2, 3), 2)
        (0.5, 0.12)
    """
    if math.isnan(cosine):
        return math.nan
    drawn = _directions(domains, count)[:, :, 0].mean(axis=1)
    return float(np.mean(drawn >= cosine - 1e-9))


def chance_of_agreement(agreement: float, domains: int, count: int) -> float:
    """Return the probability that ``count`` random directions have at least this mean pairwise cosine.

    Example:
        >>> round(chance_of_agreement(1.0, 2, 3), 2)
        0.25
    """
    if math.isnan(agreement):
        return math.nan
    # The sum over pairs is half of the squared length of the sum without the directions' own lengths.
    squared = (_directions(domains, count).sum(axis=1) ** 2).sum(axis=1)
    return float(np.mean((squared - count) / (count * (count - 1)) >= agreement - 1e-9))


def _directions(domains: int, count: int) -> np.ndarray:
    """Return random unit vectors, shape ``(draws, count, domains - 1)``."""
    drawn = np.random.default_rng(0).normal(size=(_DRAWS, count, max(domains - 1, 1)))
    return drawn / np.linalg.norm(drawn, axis=2, keepdims=True)
