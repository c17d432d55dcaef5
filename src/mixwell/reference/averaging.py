"""The effect of several validation points on a round's hypergradient, and of later training on its outcome.

On quadratics: along a direction of curvature lambda, gradient steps with learning rate eta and gradient noise of
standard deviation sigma are ``theta_{t+1} - a = rho (theta_t - a) - eta xi_t`` with ``rho = 1 - eta lambda``, an
autoregression. The functions here are its moments. They take eta (``learning_rate``), lambda (``curvature``; ``eta
lambda`` is in (0, 2)), sigma (``noise``), and the steps ``t_i`` after which iterates are taken (``points``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def iterate_variance(learning_rate: float, curvature: float, noise: float) -> float:
    """Return the variance of the iterates around the minimizer when training has settled.

    ``eta^2 sigma^2 / (1 - rho^2) = eta sigma^2 / (lambda (2 - eta lambda))``. The validation gradient at one
    iterate has ``lambda_V^2`` times as much, most along the directions of high curvature, however many validation
    rows there are: this is the noise of a hypergradient that is taken at the last iterate of a round.

    Example:
        >>> round(iterate_variance(0.1, 2.0, 1.0), 4)
        0.0278
    """
    return learning_rate * noise**2 / (curvature * (2 - learning_rate * curvature))


def averaging_factor(points: Sequence[int], learning_rate: float, curvature: float) -> float:
    """Return the variance of the mean over several iterates, over that of one iterate, in (0, 1].

    ``k^-2 sum_{i,j} rho^|t_i - t_j|``: one over the number k of points where they are farther apart than
    ``1 / (eta lambda)`` steps, as they are along directions of high curvature, and nearly 1 along flat directions,
    whose iterates are less noisy.

    Example:
        >>> round(averaging_factor([53, 63, 74, 84], 0.1, 5.0), 4), round(averaging_factor([84], 0.1, 5.0), 4)
        (0.2503, 1.0)
    """
    steps = np.asarray(points, dtype=float)
    apart = np.abs(steps[:, None] - steps[None, :])
    return float(((1 - learning_rate * curvature) ** apart).mean())


def unconverged_part(points: Sequence[int], learning_rate: float, curvature: float) -> float:
    """Return the mean fraction of the way to the minimizer that is left at the points, in [0, 1).

    ``mean_i rho^t_i``. It replaces the factor ``(1 - eta mu / 2)^(T - 1)`` of the theorems' second term, which
    averaging raises: with points in the second half of the round it is at most that of half the horizon.

    Example:
        >>> unconverged_part([1, 2], 0.5, 1.0)
        0.375
    """
    return float(((1 - learning_rate * curvature) ** np.asarray(points, dtype=float)).mean())


def persistence(steps: int, learning_rate: float, curvature: float) -> float:
    """Return the fraction of a change that remains after further steps, ``(1 - eta lambda)^steps``.

    So the effect of the weights of an early round along directions of high curvature is gone at the end of the
    run, and their effect along flat ones (``eta lambda steps`` below one) stays.

    Example:
        >>> round(persistence(100, 0.1, 0.5), 4), round(persistence(100, 0.1, 0.001), 4)
        (0.0059, 0.99)
    """
    return (1 - learning_rate * curvature) ** steps
