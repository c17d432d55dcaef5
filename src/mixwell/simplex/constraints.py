"""Constraints on the weights: bounds per domain and a pull towards a prior, composable and exact.

A mirror-descent step on a constrained simplex is

    ``w+ = argmin_{w in C} alpha <h, w> + KL(w || w_k) + alpha * lambda * KL(w || p)``

With ``log y`` the unconstrained step, the pull gives ``log q = (log y + tau log p) / (1 + tau)`` with
``tau = alpha * lambda``, and the bounds give the KL projection of ``q`` (:mod:`mixwell.simplex.projection`). Both
are solved in closed form, in log space.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np
from typing_extensions import override

from mixwell.simplex.projection import project
from mixwell.simplex.weights import Weights, normalize
from mixwell.typing import Vector

if TYPE_CHECKING:
    from mixwell.simplex.repetition import EpochCap

Bounds = float | Mapping[str, float]


class Constraint(ABC):
    """A set that the weights must stay in, or a point that they are pulled to. The defaults constrain nothing."""

    is_supply_limit: ClassVar[bool] = False
    """Whether the upper bounds are a supply limit, which overrides floors and caps."""
    is_soft: ClassVar[bool] = False
    """Whether the upper bounds yield to those of other constraints."""

    @property
    def epoch_cap(self) -> EpochCap | None:
        """The cap on epochs to which the sampler must report the rows that it takes, if this is one."""
        return None

    def at_step(self, steps_done: int) -> None:
        """Set the number of finished training steps, for bounds that depend on it; called before each update."""

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """Return the least and the greatest weight of every domain, shape ``(m,)`` each."""
        return np.zeros(len(names)), np.ones(len(names))

    def prior_pull(self, names: Sequence[str]) -> tuple[float, Vector]:
        """Return the strength ``lambda >= 0`` of the pull and the log-weights of the prior, shape ``(m,)``."""
        return 0.0, np.zeros(len(names))


@final
@dataclass(frozen=True)
class Floor(Constraint):
    """Keep every domain at this weight or above.

    Args:
        least: one number for all domains, or numbers by domain (the others have no floor).

    Example:
        >>> constrain(["a", "b"], np.log([0.999, 0.001]), [Floor(0.1)]).round(3).tolist()
        [0.9, 0.1]
    """

    least: Bounds

    @override
    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        return _by_domain("floor", self.least, names, default=0.0), np.ones(len(names))


@final
@dataclass(frozen=True)
class Cap(Constraint):
    """Keep every domain at this weight or below.

    Args:
        most: one number for all domains, or numbers by domain (the others have no cap).

    Example:
        >>> constrain(["a", "b", "c"], np.log([0.8, 0.1, 0.1]), [Cap({"a": 0.5})]).tolist()
        [0.5, 0.25, 0.25]
    """

    most: Bounds

    @override
    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        return np.zeros(len(names)), _by_domain("cap", self.most, names, default=1.0)


@final
@dataclass(frozen=True)
class PriorPull(Constraint):
    """Add ``strength * KL(w || prior)`` to the validation loss.

    Args:
        prior: positive weights by domain, or in their order; they are divided by their sum.
        strength: lambda, in the units of the validation loss.
    """

    prior: Mapping[str, float] | Sequence[float]
    strength: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.strength) and self.strength >= 0):
            raise ValueError(
                f"the strength of the prior must be finite and not negative, got {self.strength}"
            )

    @override
    def prior_pull(self, names: Sequence[str]) -> tuple[float, Vector]:
        return float(self.strength), Weights(names, self.prior).log


def apply_constraints(
    names: Sequence[str], log: Vector, constraints: Sequence[Constraint], *, step_size: float
) -> Vector:
    """Complete a mirror-descent step under constraints; bounds intersect and pulls add up.

    Args:
        log: the log-weights after the unconstrained step (normalized or not), shape ``(m,)``.
        step_size: alpha of this step, which converts the strength of a pull to nats.

    Returns:
        The log-weights on the constrained simplex, shape ``(m,)``; ``-inf`` where a cap is zero.
    """
    log = normalize(log)
    taus, priors = [], []
    for constraint in constraints:
        strength, prior = constraint.prior_pull(names)
        taus.append(step_size * strength)
        priors.append(prior)
    total = sum(taus)
    if total > 0:
        pulled = sum((tau / (1 + total)) * prior for tau, prior in zip(taus, priors, strict=True))
        log = normalize(log / (1 + total) + pulled)
    low, high = limits(names, constraints)
    return project(log, low, high)


def constrain(names: Sequence[str], log: Vector, constraints: Sequence[Constraint]) -> Vector:
    """Return the weights within the bounds that are nearest in KL divergence, shape ``(m,)``.

    Args:
        constraints: their pulls have no effect without a step.
    """
    return np.exp(apply_constraints(names, log, constraints, step_size=0.0))


def limits(names: Sequence[str], constraints: Sequence[Constraint]) -> tuple[Vector, Vector]:
    """Return the intersection of all bounds: the least and the greatest weights, shape ``(m,)`` each.

    Raises:
        ValueError: no mixture satisfies them all.
    """
    low, high = np.zeros(len(names)), np.ones(len(names))
    for constraint in constraints:
        if constraint.is_supply_limit or constraint.is_soft:
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
        if constraint.is_soft:
            high = _fit_soft_cap(low, high, constraint.bounds(names)[1])
    for constraint in constraints:
        if constraint.is_supply_limit:
            low, high = _relax_to_supply(low, high, constraint.bounds(names)[1])
    return low, high


def _fit_soft_cap(low: Vector, high: Vector, wanted: Vector) -> Vector:
    """Return upper bounds as near to ``wanted`` as the other bounds allow, summing to one or more.

    Args:
        high: the upper bounds so far, summing to at least one.
    """
    within = np.clip(wanted, low, high)
    missing, room = 1 - within.sum(), high - within
    return within + room * min(1.0, missing / room.sum()) if missing > 0 and room.sum() > 0 else within


def _relax_to_supply(low: Vector, high: Vector, supply: Vector) -> tuple[Vector, Vector]:
    """Return feasible bounds within a supply limit: floors sink to it, caps that leave too little rise to it."""
    within = np.minimum(high, supply)
    if within.sum() < 1:
        # The supplies of all domains sum to one, except for rounding in the last steps.
        missing, room = 1 - within.sum(), supply - within
        within = within + room * min(1.0, missing / room.sum()) if room.sum() > 0 else within
        within = within / within.sum() if 0 < within.sum() < 1 else within
        within = within if within.any() else np.ones_like(within)
    return np.minimum(low, within), within


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
