"""Measures of the agreement of two hypergradients, both of shape ``(m,)``."""

from __future__ import annotations

import math

import numpy as np

from mixwell.typing import Vector


def tangent(vector: Vector) -> Vector:
    """Return the component of a hypergradient that moves the weights, ``vector - mean(vector)``."""
    return vector - vector.mean()


def tangent_cosine(left: Vector, right: Vector) -> float:
    """Return the cosine in the tangent space of the simplex; NaN where one vector would not move the weights.

    NaN also where a value is not finite.

    Example:
        >>> round(tangent_cosine(np.array([1.0, 2.0, 3.0]), np.array([11.0, 12.0, 13.0])), 6)
        1.0
    """
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return math.nan
    a, b = tangent(left), tangent(right)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(1.0, max(-1.0, float(a @ b) / size)) if size else math.nan


def relative_error(estimate: Vector, exact: Vector) -> float:
    """Return ``|estimate - exact| / |exact|``; NaN where the exact one is zero."""
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(estimate - exact)) / size if size else math.nan


def sign_agreement(left: Vector, right: Vector) -> float:
    """Return the fraction of domains that both would move in the same direction (up or down against the mean)."""
    return float(np.mean(np.sign(tangent(left)) == np.sign(tangent(right))))


def rank_agreement(left: Vector, right: Vector) -> float:
    """Return Kendall's tau: pairs of domains in the same order minus pairs in the opposite order, over all pairs.

    NaN for one domain.

    Example:
        >>> rank_agreement(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])).__round__(4)
        0.3333
    """
    upper = np.triu_indices(len(left), k=1)
    if not len(upper[0]):
        return math.nan
    orders = [np.sign(np.subtract.outer(v, v))[upper] for v in (left, right)]
    return float(np.mean(orders[0] * orders[1]))
