"""Data Mixing Laws: losses that fall exponentially in the weights, their fit and their minimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mixwell.methods.search.mixtures import Matrix, require_fittable
from mixwell.typing import Vector

HUBER = 0.05
"""Where the Huber loss turns from squares to distances, in standard deviations of the losses."""
LARGEST_EXPONENT = 50.0
"""A line search may try anything; beyond this no loss is predicted, and exp must not overflow."""
GAP = 1e-3
"""How far above the minimum of a law an answer may be, as a share of the loss that mixtures can take away."""


@final
@dataclass(frozen=True)
class MixingLaw:
    """``L(r) = c + sum_i k_i exp(sum_j t_ij r_j)`` with all ``k_i > 0``, so it is convex in ``r``.

    One term is the law of one target (Ye et al. 2024, arXiv:2403.16952). Several are that of a target which has
    parts, ``sum_i s_i (c_i + k_i exp(t_i r))``; their shares ``s_i`` cannot be distinguished from the ``k_i`` and
    are taken into them. On weights that sum to one, ``t_i`` is known only up to a constant, for which ``k_i``
    makes up; here every ``t_i`` has mean zero.

    Args:
        constant: c, the loss that no mixture takes away.
        levels: ``log k``, shape ``(parts,)``; a term that hardly matters may have a k that no float can hold.
        slopes: t, shape ``(parts, m)``.
    """

    constant: float
    levels: Vector
    slopes: Matrix

    def predict(self, weights: Matrix) -> Vector:
        """Return the predicted losses of mixtures, shape ``(n, m)`` to shape ``(n,)``."""
        return self.constant + np.exp(weights @ self.slopes.T + self.levels).sum(axis=1)


def usual_penalty(*, parts: int, domains: int, proxies: int) -> float:
    """Return the ``penalty`` of :func:`fit` where proxies are few.

    ``.005 (p/n)^2`` for ``p`` parameters and ``n`` proxies. Without it, several terms and few proxies extrapolate
    badly.
    """
    return 0.005 * ((1 + parts * domains) / proxies) ** 2


def fit(
    weights: Matrix,
    losses: Vector,
    *,
    parts: int = 1,
    penalty: float = 0.0,
    starts: int = 16,
    huber: float = HUBER,
    seed: int = 0,
) -> MixingLaw:
    """Fit a law to proxies: the Huber loss, by L-BFGS from many starts, the best of which is kept.

    First one term is fitted, from constants ``c`` at many distances below the least loss (given ``c``, the slopes
    follow from the logarithms by least squares); several begin at equal shares of that one, shaken at random.

    Args:
        weights: of the proxies, rows that sum to one, shape ``(n, m)``.
        losses: of the proxies, shape ``(n,)``.
        parts: number of terms.
        penalty: adds ``penalty/2 sum_i |t_i - mean_i t_i|^2`` to the mean Huber loss (in units of ``huber``, of
            standardized losses); a strong one leaves a law of one term.
        huber: residuals beyond it count by their size and not their square, in standard deviations of the losses.
    """
    require_fittable(weights, losses)
    if parts < 1 or starts < 1 or huber <= 0 or penalty < 0:
        raise ValueError(
            "parts and starts must be 1 or more, huber positive and penalty not negative; got "
            f"{parts}, {starts}, {huber} and {penalty}"
        )
    # The same fit whatever the unit of the losses.
    level, unit = float(losses.mean()), float(losses.std()) or 1.0
    target = (losses - level) / unit
    rng = np.random.default_rng(seed)
    reach = float(np.ptp(target)) or 1.0
    begins: list[Vector] = []
    for distance in np.geomspace(0.03, 3.0, starts) * reach:
        constant = target.min() - distance
        slopes = np.linalg.lstsq(weights, np.log(target - constant), rcond=None)[0]
        begins.append(np.concatenate([[constant], slopes]))
    found = _search(begins, weights, target, 1, huber, 0.0)
    if parts > 1:
        shared = found[1:] - np.log(parts)
        shaken = shared + rng.normal(size=(starts, parts, weights.shape[1]))
        begins = [np.concatenate([found[:1], one.ravel()]) for one in shaken]
        found = _search(begins, weights, target, parts, huber, penalty)
    exponents = found[1:].reshape(parts, -1)
    middle = exponents.mean(axis=1)
    return MixingLaw(level + unit * float(found[0]), np.log(unit) + middle, exponents - middle[:, None])


def minimizer(law: MixingLaw, most: Vector | None = None) -> Vector:
    """Return the mixture with the least loss by a law.

    SLSQP minimizes ``log sum_i k_i exp(t_i r)``, which is convex, has the minimizer of the law and is well scaled.
    The answer is checked: a convex function is at most ``<g, r> - min_v <g, v>`` above its minimum, ``g`` its
    gradient at ``r`` and ``v`` any mixture that is allowed.

    Args:
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


def _search(
    begins: Sequence[Vector], weights: Matrix, target: Vector, parts: int, huber: float, penalty: float
) -> Vector:
    """Return the best of many descents over ``c`` and ``u_ij = t_ij + log k_i``, which are identifiable."""
    from scipy.optimize import minimize

    def objective(point: Vector) -> tuple[float, Vector]:
        exponents = point[1:].reshape(parts, -1)
        terms = np.exp(np.minimum(weights @ exponents.T, LARGEST_EXPONENT))
        residuals = point[0] + terms.sum(axis=1) - target
        size = np.abs(residuals)
        value = np.where(size <= huber, residuals**2 / (2 * huber), size - huber / 2).mean()
        slope = np.clip(residuals / huber, -1.0, 1.0) / len(target)
        # Only differences between the parts are penalized, not what they have in common nor their scales.
        apart = exponents - exponents.mean(axis=0)
        apart = apart - apart.mean(axis=1, keepdims=True)
        value += penalty / 2 * (apart**2).sum()
        by_exponent = (terms * slope[:, None]).T @ weights + penalty * apart
        return float(value), np.concatenate([[slope.sum()], by_exponent.ravel()])

    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-14, "gtol": 1e-9, "maxcor": 20}
    descents: list[Any] = [
        minimize(objective, begin, jac=True, method="L-BFGS-B", options=options) for begin in begins
    ]
    return min(descents, key=lambda one: float(one.fun)).x


def _feasible(mixture: Vector, high: Vector) -> Vector:
    """Undo the rounding by which a solver leaves the bounds or the sum of one."""
    clipped = np.clip(mixture, 0.0, high)
    excess = clipped.sum() - 1.0
    if excess > 0:
        return clipped / clipped.sum()
    room = high - clipped
    return clipped - excess * room / room.sum() if excess < 0 else clipped


def _least_linear(slope: Vector, high: Vector) -> Vector:
    """Return the mixture with the least ``<slope, v>``: the best domains are filled up one after the other."""
    corner = np.zeros_like(high)
    left = 1.0
    for j in np.argsort(slope):
        corner[j] = min(left, high[j])
        left -= corner[j]
    return corner
