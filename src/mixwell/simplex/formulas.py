"""The paper's closed-form choices of horizon and step size."""

from __future__ import annotations

import math


def stochastic_horizon(budget: int) -> int:
    """Return the horizon that minimizes the stochastic bound up to constants.

    ``T = ceil(sqrt(N log N))``, at least 1.

    Args:
        budget: the number N of training steps.

    Raises:
        ValueError: the budget is below one.

    Example:
        >>> [stochastic_horizon(n) for n in (1, 1000, 5000, 10000)]
        [1, 84, 207, 304]
    """
    check_budget(budget)
    return max(1, math.ceil(math.sqrt(budget * math.log(budget))))


def deterministic_horizon(budget: int, *, learning_rate: float, strong_convexity: float) -> int:
    """Return the paper's horizon for full gradients, ``T = ceil(2 log N / (eta mu))``, at least 1.

    It may exceed the budget: the theorem then says nothing.

    Args:
        budget: the number N of training steps.
        learning_rate: eta, the step size of the model's training.
        strong_convexity: mu, a lower bound of the curvature of every domain's loss.

    Raises:
        ValueError: the budget is below one, or eta or mu is not positive.

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


def mirror_step_size(*, rounds: int, domains: int, size: float) -> float:
    """Return the theorems' step size of mirror descent, ``alpha = sqrt(log m / K) / size``.

    The theorems' size is ``G G_V / mu_hat``, an upper bound of every entry of the hypergradient.

    Args:
        rounds: the number K of weight updates.
        domains: the number m of domains.
        size: the size of the hypergradients; where it is 0, so is alpha.

    Raises:
        ValueError: there is no round.

    Example:
        >>> round(mirror_step_size(rounds=12, domains=3, size=0.5), 4)
        0.6051
    """
    if rounds < 1:
        raise ValueError(f"there must be at least 1 round, got {rounds}")
    if size <= 0:
        return 0.0
    return math.sqrt(math.log(domains) / rounds) / size


def check_budget(budget: int) -> None:
    """Raise ``ValueError`` for a budget below one step."""
    if budget < 1:
        raise ValueError(f"budget must be at least 1 training step, got {budget}")
