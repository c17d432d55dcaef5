"""How alike two hypergradients are, as far as the weights can tell."""

from __future__ import annotations

import math

import numpy as np

from mixwell.typing import Vector


def tangent(vector: Vector) -> Vector:
    """The part of a hypergradient that moves the weights: its component with zero sum.

    Args:
        vector: shape ``(m,)``.

    Returns:
        ``vector - mean(vector)``.
    """
    return vector - vector.mean()


def tangent_cosine(left: Vector, right: Vector) -> float:
    """The cosine in the tangent space of the simplex.

    Args:
        left: shape ``(m,)``.
        right: shape ``(m,)``.

    Returns:
        Between -1 and 1; NaN where one of them would not move the weights at all.

    Example:
        >>> round(tangent_cosine(np.array([1.0, 2.0, 3.0]), np.array([11.0, 12.0, 13.0])), 6)
        1.0
    """
    a, b = tangent(left), tangent(right)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(1.0, max(-1.0, float(a @ b) / size)) if size else math.nan


def relative_error(estimate: Vector, exact: Vector) -> float:
    """``|estimate - exact| / |exact|``.

    Args:
        estimate: shape ``(m,)``.
        exact: shape ``(m,)``.

    Returns:
        Not negative; NaN where the exact one is zero.
    """
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(estimate - exact)) / size if size else math.nan


def sign_agreement(left: Vector, right: Vector) -> float:
    """The share of domains that both would move in the same direction (up or down against the mean).

    Args:
        left: shape ``(m,)``.
        right: shape ``(m,)``.

    Returns:
        Between 0 and 1.
    """
    return float(np.mean(np.sign(tangent(left)) == np.sign(tangent(right))))


def rank_agreement(left: Vector, right: Vector) -> float:
    """Kendall's tau: pairs of domains in the same order minus pairs in the opposite order, over all pairs.

    Args:
        left: shape ``(m,)``, m at least 2.
        right: shape ``(m,)``.

    Returns:
        Between -1 and 1; NaN for one domain.

    Example:
        >>> rank_agreement(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])).__round__(4)
        0.3333
    """
    upper = np.triu_indices(len(left), k=1)
    if not len(upper[0]):
        return math.nan
    orders = [np.sign(np.subtract.outer(v, v))[upper] for v in (left, right)]
    return float(np.mean(orders[0] * orders[1]))
