"""Horizons: the number of training steps that one weight update looks back over.

A budget of N steps is divided into rounds of T steps. When T does not divide N, the last round has between T/2 and
3T/2 steps (:class:`mixwell.simplex.rounds.RoundClock`); a short one moves the weights proportionally less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from typing_extensions import override


def stochastic_horizon(budget: int, factor: float = 1.0) -> int:
    """Return the horizon that minimizes the stochastic bound up to constants, ``T = ceil(factor sqrt(N log N))``.

    Args:
        budget: the number N of training steps.
        factor: 1 is the paper's choice.

    Returns:
        At least 1.

    Example:
        >>> [stochastic_horizon(n) for n in (1, 1000, 5000, 10000)]
        [1, 84, 207, 304]
    """
    check_budget(budget)
    return max(1, math.ceil(factor * math.sqrt(budget * math.log(budget))))


def deterministic_horizon(budget: int, *, learning_rate: float, strong_convexity: float) -> int:
    """Return the paper's horizon for full gradients, ``T = ceil(2 log N / (eta mu))``.

    Args:
        budget: the number N of training steps.
        learning_rate: eta, the step size of the model's training.
        strong_convexity: mu, a lower bound of the curvature of every domain's loss.

    Returns:
        At least 1. It may exceed the budget: the theorem then says nothing.

    Example:
        >>> deterministic_horizon(1000, learning_rate=0.1, strong_convexity=1.0)
        139
    """
    check_budget(budget)
    if not (learning_rate > 0 and strong_convexity > 0):
        raise ValueError(
            f"learning_rate and strong_convexity must be positive, got {learning_rate} and {strong_convexity}"
        )
    return max(1, math.ceil(2 * math.log(budget) / (learning_rate * strong_convexity)))


def check_budget(budget: int) -> None:
    """Raise ``ValueError`` for a budget below one step."""
    if budget < 1:
        raise ValueError(f"budget must be at least 1 training step, got {budget}")


class Horizon(ABC):
    """A rule for the number T of steps in a round."""

    @abstractmethod
    def length(self, budget: int | None) -> int:
        """Return the number T of training steps between two weight updates.

        Args:
            budget: the number N of training steps, if it is known.
        """


@final
@dataclass(frozen=True)
class FixedHorizon(Horizon):
    """One weight update every ``steps`` training steps.

    Example:
        >>> FixedHorizon(84).length(budget=1000)
        84
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or int(self.steps) != self.steps or self.steps < 1:
            raise ValueError(f"a horizon must be a whole number of at least 1 step, got {self.steps!r}")

    @override
    def length(self, budget: int | None) -> int:
        return int(self.steps)


@final
@dataclass(frozen=True)
class StochasticHorizon(Horizon):
    """The paper's choice for noisy gradients (the stochastic theorem); see :func:`stochastic_horizon`.

    The theorem leaves the constant open. It balances the number of updates against the noise of one; a
    hypergradient that is averaged over several iterates is less noisy, so the default is half of the paper's.

    Example:
        >>> StochasticHorizon().length(budget=1000), StochasticHorizon(0.5).length(budget=1000)
        (84, 42)
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"the factor of a horizon must be positive and finite, got {self.factor!r}")

    @override
    def length(self, budget: int | None) -> int:
        return stochastic_horizon(_needed(budget, self), self.factor)


@final
@dataclass(frozen=True)
class DeterministicHorizon(Horizon):
    """The paper's choice for full gradients (the deterministic theorem); see :func:`deterministic_horizon`."""

    learning_rate: float
    strong_convexity: float

    @override
    def length(self, budget: int | None) -> int:
        return deterministic_horizon(
            _needed(budget, self), learning_rate=self.learning_rate, strong_convexity=self.strong_convexity
        )


DEFAULT = StochasticHorizon(0.5)
"""The horizon where none is given."""


def resolve(horizon: Horizon | int | None, budget: int | None) -> int:
    """Return the horizon T of a run, between 1 and the budget.

    Args:
        horizon: a rule, a number of steps, or ``None`` for :data:`DEFAULT`.
        budget: the number N of training steps, or ``None`` where it is not known.

    Raises:
        ValueError: T exceeds the budget, or the budget is missing or not positive.

    Example:
        >>> resolve(None, 5000), resolve(StochasticHorizon(), 5000), resolve(20, None)
        (104, 207, 20)
    """
    if budget is not None and (isinstance(budget, bool) or int(budget) != budget or budget < 1):
        raise ValueError(f"budget must be a whole number of at least 1 training step, got {budget!r}")
    if horizon is None:
        horizon = DEFAULT
    rule = horizon if isinstance(horizon, Horizon) else FixedHorizon(horizon)
    length = int(rule.length(budget))
    if budget is not None and length > budget:
        raise ValueError(
            f"the horizon of {length} steps ({rule}) exceeds the budget of {budget} training steps, so the "
            "weights would never be updated; give a shorter horizon or a larger budget"
        )
    return length


def _needed(budget: int | None, horizon: Horizon) -> int:
    if budget is None:
        raise ValueError(
            f"the horizon {horizon} follows from the number of training steps; "
            "give budget=<training steps>, or a fixed horizon=<steps per weight update>"
        )
    return budget
