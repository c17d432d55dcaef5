"""Power laws of losses, ``L(n) = e + a n^-b``, fitted without a library beyond NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from mixwell.simplex.weights import TINY
from mixwell.typing import Vector

EXPONENTS = (0.05, 0.8)
"""The least and the greatest exponent of a law, as in the code of ADO's authors."""
HUBER = 1e-3
"""Errors of the log loss beyond this count by their size and not by its square."""
_GRID, _ZOOMS, _ITERATIONS = 24, 4, 12
# The least loss relative to the greatest, so that logarithms exist.
_LEAST = 1e-9

Matrix = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Law:
    """``L(n) = irreducible + scale * n ** -exponent``.

    Args:
        irreducible: the loss that stays, not negative.
        scale: of what can be learned, not negative.
        exponent: how fast it is.
    """

    irreducible: float
    scale: float
    exponent: float

    def slope(self, n: float) -> float:
        """Return ``-dL/dn``, how much one more sample lowers the loss."""
        return self.exponent * self.scale * n ** (-self.exponent - 1)


def fit_law(n: Vector, losses: Vector, counts: Vector) -> Law:
    """Return the law with the least Huber loss of ``log L(n) - log losses``.

    For a given exponent the law is linear in the other two. They are found by Gauss-Newton steps, each a
    least squares problem with two unknowns that are not negative (in closed form) and with weights that make it
    Huber's. The exponent is searched on a grid, and on finer ones around the best.

    Args:
        n: samples, positive, shape ``(points,)``.
        losses: at these, not negative, shape ``(points,)``.
        counts: how often each point counts, shape ``(points,)``.

    Example:
        >>> n = np.geomspace(10, 10_000, 30)
        >>> law = fit_law(n, 2 + 5 * n**-0.3, np.ones(30))
        >>> round(law.irreducible, 2), round(law.scale, 2), round(law.exponent, 2)
        (2.0, 5.0, 0.3)
    """
    low, high = EXPONENTS
    unit = float(losses.max())
    if not unit:
        return Law(0.0, 0.0, low)
    center = float(np.log(n).mean())  # in units of the middle, so that no power is too large or too small
    log_n, log_losses = np.log(n) - center, np.log(np.maximum(losses / unit, _LEAST))
    best = 0
    irreducible = scale = exponents = np.zeros(1)
    for _ in range(_ZOOMS):
        exponents = np.linspace(low, high, _GRID)
        irreducible, scale, errors = _fit_linear(np.exp(-exponents[:, None] * log_n), log_losses, counts)
        best = int(errors.argmin())
        low, high = exponents[max(best - 1, 0)], exponents[min(best + 1, _GRID - 1)]
    exponent = float(exponents[best])
    whole = unit * float(scale[best]) * float(np.exp(exponent * center))
    return Law(unit * float(irreducible[best]), whole, exponent)


def _fit_linear(powers: Matrix, log_losses: Vector, counts: Vector) -> tuple[Vector, Vector, Vector]:
    """For each row of powers ``n^-b`` the best irreducible loss and scale, and their error."""
    near = np.broadcast_to(np.exp(log_losses), powers.shape)
    irreducible, scale = _not_negative(powers, near, counts / near**2)
    best = irreducible, scale, _error(irreducible, scale, powers, log_losses, counts)
    for _ in range(_ITERATIONS):
        near = np.maximum(irreducible[:, None] + scale[:, None] * powers, _LEAST)
        away = log_losses - np.log(near)
        huber = np.minimum(1, HUBER / np.maximum(np.abs(away), TINY))
        # log(e + a x) is near to log(near) + (e + a x - near) / near, which is linear in e and a.
        irreducible, scale = _not_negative(powers, near * (1 + away), counts * huber / near**2)
        error = _error(irreducible, scale, powers, log_losses, counts)
        better = error < best[2]
        best = (
            np.where(better, irreducible, best[0]),
            np.where(better, scale, best[1]),
            np.where(better, error, best[2]),
        )
    return best


def _not_negative(x: Matrix, y: Matrix, weights: Matrix) -> tuple[Vector, Vector]:
    """``e`` and ``a``, not negative, of the weighted least squares line ``y = e + a x``, for each row."""
    total = weights.sum(axis=1)
    mean_x, mean_y = (weights * x).sum(axis=1) / total, (weights * y).sum(axis=1) / total
    apart = x - mean_x[:, None]
    slope = (weights * apart * y).sum(axis=1) / np.maximum((weights * apart**2).sum(axis=1), TINY)
    cut = mean_y - slope * mean_x
    through_zero = (weights * x * y).sum(axis=1) / (weights * x**2).sum(axis=1)
    slope, cut = np.where(cut < 0, through_zero, slope), np.maximum(cut, 0)
    falls = slope > 0
    return np.where(falls, cut, np.maximum(mean_y, 0)), np.where(falls, slope, 0.0)


def _error(irreducible: Vector, scale: Vector, powers: Matrix, log_losses: Vector, counts: Vector) -> Vector:
    """Huber's loss of the log losses, for each row."""
    law = np.maximum(irreducible[:, None] + scale[:, None] * powers, _LEAST)
    size = np.abs(np.log(law) - log_losses)
    each = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return (counts * each).sum(axis=1)
