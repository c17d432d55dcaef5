"""Where the weights may live: bounds per domain and a pull towards a prior, composable and exact.

A mirror-descent step on a constrained simplex is

    ``w+ = argmin_{w in C} alpha <h, w> + KL(w || w_k) + alpha * lambda * KL(w || p)``

With ``log y`` the unconstrained step, the pull gives ``log q = (log y + tau log p) / (1 + tau)`` with
``tau = alpha * lambda``, and the bounds give the KL projection of ``q``:
``w_j = clip(s q_j, low_j, high_j)`` with the one ``s`` for which they sum to one. Both are solved in closed
form, in log space.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from mixwell.simplex.weights import LOWEST_LOG, TINY, Weights, normalize
from mixwell.typing import Vector

Bounds = float | Mapping[str, float]


class Constraint(ABC):
    """A set the weights must stay in, or a point they are pulled to. The defaults constrain nothing."""

    scarce: ClassVar[bool] = False
    """Whether the bounds say what there is, to which what is wanted gives way."""
    soft: ClassVar[bool] = False
    """Whether the bounds give way to those of other constraints."""

    def at_step(self, steps_done: int) -> None:
        """Set the time, for bounds that depend on it. It is called before each update.

        Args:
            steps_done: training steps so far.
        """

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """The least and the greatest weight of every domain.

        Args:
            names: the domains.

        Returns:
            Two arrays of shape ``(m,)``.
        """
        return np.zeros(len(names)), np.ones(len(names))

    def pull(self, names: Sequence[str]) -> tuple[float, Vector]:
        """The strength lambda of the pull and the logarithm of the prior that it pulls to.

        Args:
            names: the domains.

        Returns:
            ``lambda >= 0`` and log-weights of shape ``(m,)``.
        """
        return 0.0, np.zeros(len(names))


@final
@dataclass(frozen=True)
class Floor(Constraint):
    """Every domain keeps at least this weight.

    Args:
        least: one number for all domains, or numbers by domain (the others have no floor).

    Example:
        >>> constrain(["a", "b"], np.log([0.999, 0.001]), [Floor(0.1)]).round(3).tolist()
        [0.9, 0.1]
    """

    least: Bounds

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """``[least, 1]``.

        Args:
            names: the domains.

        Returns:
            Lower and upper bounds, shape ``(m,)`` each.
        """
        return _by_domain("floor", self.least, names, default=0.0), np.ones(len(names))


@final
@dataclass(frozen=True)
class Cap(Constraint):
    """No domain gets more than this weight.

    Args:
        most: one number for all domains, or numbers by domain (the others have no cap).

    Example:
        >>> constrain(["a", "b", "c"], np.log([0.8, 0.1, 0.1]), [Cap({"a": 0.5})]).tolist()
        [0.5, 0.25, 0.25]
    """

    most: Bounds

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """``[0, most]``.

        Args:
            names: the domains.

        Returns:
            Lower and upper bounds, shape ``(m,)`` each.
        """
        return np.zeros(len(names)), _by_domain("cap", self.most, names, default=1.0)


@final
@dataclass(frozen=True)
class PriorPull(Constraint):
    """Adds ``strength * KL(w || prior)`` to the validation loss.

    Args:
        prior: positive weights by domain, or in their order; they are divided by their sum.
        strength: lambda, in the units of the validation loss.

    Raises:
        ValueError: the strength is negative or not finite.
    """

    prior: Mapping[str, float] | Sequence[float]
    strength: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.strength) and self.strength >= 0):
            raise ValueError(f"the prior's strength must be finite and not negative, got {self.strength}")

    def pull(self, names: Sequence[str]) -> tuple[float, Vector]:
        """The strength and the log-prior.

        Args:
            names: the domains.

        Returns:
            ``lambda`` and log-weights, shape ``(m,)``.
        """
        return float(self.strength), Weights(names, self.prior).log


def apply(
    names: Sequence[str], log: Vector, constraints: Sequence[Constraint], *, step_size: float
) -> Vector:
    """Finish a mirror-descent step under constraints.

    Args:
        names: the domains.
        log: the unconstrained step's log-weights (normalized or not), shape ``(m,)``.
        constraints: what to obey; bounds intersect and pulls add up.
        step_size: alpha of this step, which turns a pull's strength into a number of nats.

    Returns:
        The log-weights on the constrained simplex, shape ``(m,)``; ``-inf`` where a cap is zero.
    """
    log = normalize(log)
    taus, priors = [], []
    for constraint in constraints:
        strength, prior = constraint.pull(names)
        taus.append(step_size * strength)
        priors.append(prior)
    total = sum(taus)
    if total > 0:
        pulled = sum((tau / (1 + total)) * prior for tau, prior in zip(taus, priors, strict=True))
        log = normalize(log / (1 + total) + pulled)
    low, high = limits(names, constraints)
    return project(log, low, high)


def constrain(names: Sequence[str], log: Vector, constraints: Sequence[Constraint]) -> Vector:
    """The point of the constrained simplex that is nearest in KL divergence.

    Args:
        names: the domains.
        log: log-weights, shape ``(m,)``.
        constraints: the bounds to obey (a pull has no effect without a step).

    Returns:
        Weights, shape ``(m,)``.
    """
    return np.exp(apply(names, log, constraints, step_size=0.0))


def limits(names: Sequence[str], constraints: Sequence[Constraint]) -> tuple[Vector, Vector]:
    """The intersection of all bounds.

    Args:
        names: the domains.
        constraints: whose bounds.

    Returns:
        The least and the greatest weights, shape ``(m,)`` each.

    Raises:
        ValueError: no mixture obeys them all.
    """
    low, high = np.zeros(len(names)), np.ones(len(names))
    for constraint in constraints:
        if constraint.scarce or constraint.soft:
            continue
        one_low, one_high = constraint.bounds(names)
        low, high = np.maximum(low, one_low), np.minimum(high, one_high)
    crossed = [f"{n} (at least {a}, at most {b})" for n, a, b in zip(names, low, high, strict=True) if a > b]
    if crossed:
        raise ValueError(f"floor above cap for {', '.join(crossed)}")
    if low.sum() > 1 + 1e-9:
        raise ValueError(
            f"the floors of {len(names)} domains sum to {low.sum():.6g}, more than 1; lower them"
        )
    if high.sum() < 1 - 1e-9:
        raise ValueError(f"the caps of {len(names)} domains sum to {high.sum():.6g}, less than 1; raise them")
    for constraint in constraints:
        if constraint.soft:
            high = _soften(low, high, constraint.bounds(names)[1])
    for constraint in constraints:
        if constraint.scarce:
            low, high = _give_way(low, high, constraint.bounds(names)[1])
    return low, high


def _soften(low: Vector, high: Vector, wanted: Vector) -> Vector:
    """Greatest weights as near to those wanted as the other bounds allow, summing to one or more.

    Args:
        low: the least weights, shape ``(m,)``.
        high: the greatest weights, summing to at least one, shape ``(m,)``.
        wanted: lower greatest weights, shape ``(m,)``.

    Returns:
        New greatest weights, shape ``(m,)``.
    """
    within = np.clip(wanted, low, high)
    missing, room = 1 - within.sum(), high - within
    return within + room * min(1.0, missing / room.sum()) if missing > 0 and room.sum() > 0 else within


def _give_way(low: Vector, high: Vector, there: Vector) -> tuple[Vector, Vector]:
    """Bounds within what there is: floors sink to it, and where caps leave too little, those that can rise do.

    Args:
        low: the least weights, shape ``(m,)``.
        high: the greatest weights, shape ``(m,)``.
        there: the greatest weights that can be served, shape ``(m,)``.

    Returns:
        New bounds that some mixture obeys.
    """
    within = np.minimum(high, there)
    if within.sum() < 1:
        # What all could serve sums to one, but for the rounding of the last steps.
        missing, room = 1 - within.sum(), there - within
        within = within + room * min(1.0, missing / room.sum()) if room.sum() > 0 else within
        within = within / within.sum() if 0 < within.sum() < 1 else within
        within = within if within.any() else np.ones_like(within)
    return np.minimum(low, within), within


def project(log: Vector, low: Vector, high: Vector) -> Vector:
    """KL projection onto ``{low <= w <= high, sum w = 1}``: ``w_j = clip(s q_j, low_j, high_j)``.

    As s grows from zero, each domain leaves its floor at one value of ``log s`` and meets its cap at another.
    These 2m events are walked in order; the last one at which the clipped sum does not exceed one tells which
    domains are at which bound, and the free ones share the rest in proportion. Domains are told apart by the
    order of events, not by sums of logarithms, which cancel where log-weights differ by 1e300.

    Args:
        log: log-weights ``log q``, shape ``(m,)``; ``-inf`` for a weight of zero.
        low: the least weights, summing to at most one, shape ``(m,)``.
        high: the greatest weights, summing to at least one, shape ``(m,)``.

    Returns:
        Log-weights, shape ``(m,)``; ``-inf`` where ``high`` is zero.
    """
    m = len(log)
    if not low.any() and (high == 1).all():
        return log
    log = np.maximum(log, LOWEST_LOG)
    with np.errstate(divide="ignore"):
        log_low, log_high = np.log(low), np.log(high)
    events = np.concatenate([log_low - log, log_high - log])
    order = np.argsort(events, kind="stable")
    rank = np.empty(2 * m, dtype=np.int64)
    rank[order] = np.arange(2 * m)
    leaves_floor, meets_cap = rank[:m], rank[m:]
    at_event = np.arange(2 * m)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.clip(np.exp(np.clip(log + events[order][:, None], log_low, log_high)), low, high)
    totals = np.where(leaves_floor >= at_event, low, np.where(meets_cap <= at_event, high, grown)).sum(axis=1)
    below = np.flatnonzero(totals <= 1)
    last = int(below[-1]) if below.size else -1
    while True:
        at_low, at_high = leaves_floor > last, meets_cap <= last
        free = ~(at_low | at_high)
        rest = 1 - low[at_low].sum() - high[at_high].sum()
        if last < 0 or not free.any() or rest >= grown[last, free].sum() * (1 - 1e-9):
            break
        last -= 1  # free weights that vanish beside 1 in a sum must not vanish: the cap is not quite met
    result = np.where(at_low, log_low, log_high)
    if free.any():
        result[free] = normalize(log[free]) + np.log(max(rest, TINY))
    result = np.clip(result, log_low, log_high)
    missing = 1 - np.exp(result).sum()
    return result if abs(missing) < 1e-9 else _fill(np.exp(result), log, low, high)


def _fill(weights: Vector, log: Vector, low: Vector, high: Vector) -> Vector:
    """Hand out what is missing, the greatest log-weights first (or take what is too much from the least).

    Only log-weights of 1e16 and beyond, whose order of events rounding has blurred, come here; in that limit
    the projection does just this.
    """
    missing = 1 - weights.sum()
    for j in np.argsort(-log if missing > 0 else log, kind="stable"):
        change = np.clip(missing, low[j] - weights[j], high[j] - weights[j])
        weights[j] += change
        missing -= change
    with np.errstate(divide="ignore"):
        return np.log(weights)


def _by_domain(what: str, value: Bounds, names: Sequence[str], *, default: float) -> Vector:
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(names))
        if unknown:
            raise ValueError(f"{what} names unknown domains {unknown}; the domains are {list(names)}")
        array = np.array([value.get(name, default) for name in names], dtype=np.float64)
    else:
        array = np.full(len(names), float(value))
    if not ((array >= 0) & (array <= 1)).all():
        raise ValueError(f"a {what} must be between 0 and 1, got {value}")
    return array
