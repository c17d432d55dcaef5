"""The best mixture by a fitted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mixwell.methods.proxies import fixed_weights
from mixwell.methods.search.laws import Law
from mixwell.methods.search.mixtures import Matrix
from mixwell.methods.search.regression import Predictor
from mixwell.typing import Vector

FLOOR = 1e-6
"""The least weight of a proposal: none may be zero, and so little trains nothing."""
GAP = 1e-3
"""How far above the minimum of a law an answer may be, as a share of the loss that mixtures can take away."""


def best_average(predict: Predictor, samples: Matrix, top: int) -> Vector:
    """Return the average of the ``top`` samples, shape ``(n, m)``, with the least predicted losses.

    Raises:
        ValueError: the model predicts the same loss for all, or ``top`` is not between 1 and n.
    """
    if not 1 <= top <= len(samples):
        raise ValueError(f"top must be between 1 and the {len(samples)} samples, got {top}")
    predicted = predict(samples)
    if np.ptp(predicted) == 0:
        raise ValueError(
            f"the model predicts {predicted[0]:.6g} for every mixture, so none is better than another; train more "
            "proxies, longer, or choose another model"
        )
    best = np.argsort(predicted, kind="stable")[:top]  # trees predict many ties
    average = samples[best].mean(axis=0)
    return average / average.sum()


def minimizer(law: Law, most: Vector | None = None) -> Vector:
    """Return the mixture with the least loss by a law.

    SLSQP minimizes ``log sum_i k_i exp(t_i r)``, which is convex, has the minimizer of the law and is well scaled.
    The answer is checked: a convex function is at most ``<g, r> - min_v <g, v>`` above its minimum, ``g`` its
    gradient at ``r`` and ``v`` any mixture that is allowed.

    Args:
        law: of the target.
        most: the greatest weight of each domain, which together allow one or more, shape ``(m,)``; ``None`` for 1.

    Returns:
        Shape ``(m,)``. With one term it is as far in the corner of the best domain as ``most`` allows.

    Raises:
        ValueError: the greatest weights do not allow any mixture.
        RuntimeError: the search did not end near the minimum.
    """
    from scipy.optimize import minimize

    domains = law.slopes.shape[1]
    high = np.ones(domains) if most is None else np.minimum(most, 1.0)
    if high.shape != (domains,) or not (high >= 0).all() or high.sum() < 1 - 1e-9:
        raise ValueError(
            f"the greatest weights must be {domains} numbers that sum to 1 or more, got {high.tolist()}"
        )
    high = high / min(1.0, high.sum())
    if len(law.slopes) == 1:
        return _least_linear(law.slopes[0], high)

    def objective(mixture: Vector) -> tuple[float, Vector]:
        exponents = law.slopes @ mixture + law.levels
        largest = exponents.max()
        terms = np.exp(exponents - largest)
        return float(largest + np.log(terms.sum())), law.slopes.T @ (terms / terms.sum())

    found: Any = minimize(
        objective,
        high / high.sum(),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, float(h)) for h in high],
        constraints={"type": "eq", "fun": lambda r: r.sum() - 1.0, "jac": np.ones_like},
        options={"maxiter": 1000, "ftol": 1e-15},
    )
    # It may stop early where slopes are steep, so its own success flag is not enough.
    best = _feasible(np.asarray(found.x, dtype=np.float64), high)
    gradient = objective(best)[1]
    gap = float(gradient @ (best - _least_linear(gradient, high)))
    if not gap <= GAP:
        raise RuntimeError(
            f"the minimum of the law is missed by up to {gap:.2g} ({found.message}); fit fewer parts"
        )
    return best


def settings(domains: Sequence[str], weights: Vector) -> Mapping[str, Any]:
    """Return settings of the mixer that keep a proposal; weights below :data:`FLOOR` are raised to it."""
    raised = np.maximum(weights, FLOOR)
    return fixed_weights(dict(zip(domains, (raised / raised.sum()).tolist(), strict=True)))


def _feasible(mixture: Vector, high: Vector) -> Vector:
    """Take away the rounding by which a solver leaves the bounds or the sum of one."""
    clipped = np.clip(mixture, 0.0, high)
    excess = clipped.sum() - 1.0
    if excess > 0:
        return clipped / clipped.sum()
    room = high - clipped
    return clipped - excess * room / room.sum() if excess < 0 else clipped


def _least_linear(slope: Vector, high: Vector) -> Vector:
    """The mixture with the least ``<slope, v>``: the best domains are filled up one after the other."""
    corner = np.zeros_like(high)
    left = 1.0
    for j in np.argsort(slope):
        corner[j] = min(left, high[j])
        left -= corner[j]
    return corner
