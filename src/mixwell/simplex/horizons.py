"""Horizons: the number of training steps that one weight update looks back over.

A budget of N steps is divided into rounds of T steps. When T does not divide N the last round is short: its
hypergradient sums fewer steps, and it moves the weights proportionally less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from typing_extensions import override

from mixwell.simplex import formulas


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

    Raises:
        ValueError: ``steps`` is not a positive whole number.

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
    """The paper's choice for noisy gradients: ``ceil(factor * sqrt(N log N))`` (stochastic theorem).

    The theorem leaves the constant open. It balances the number of updates against the noise of one; a
    hypergradient that is averaged over several iterates is less noisy, so the default is half of the paper's.

    Args:
        factor: 1 is the paper's choice.

    Raises:
        ValueError: the factor is not positive and finite.

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
        steps = _needed(budget, self)
        if self.factor == 1:
            return formulas.stochastic_horizon(steps)
        return max(1, math.ceil(self.factor * math.sqrt(steps * math.log(steps))))


@final
@dataclass(frozen=True)
class DeterministicHorizon(Horizon):
    """The paper's choice for full gradients: ``T = ceil(2 log N / (eta mu))`` (the deterministic theorem).

    Args:
        learning_rate: eta, the learning rate of the model.
        strong_convexity: mu, a lower bound of the curvature of the losses.

    Example:
        >>> DeterministicHorizon(learning_rate=0.1, strong_convexity=1.0).length(budget=1000)
        139
    """

    learning_rate: float
    strong_convexity: float

    @override
    def length(self, budget: int | None) -> int:
        return formulas.deterministic_horizon(
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
