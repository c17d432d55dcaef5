"""The paper's choices of horizon, learning rate and step size, and where the theorems begin to speak."""

from __future__ import annotations

import math

from mixwell.theory.constants import Constants, check_rate


def stochastic_horizon(budget: int) -> int:
    """The horizon that minimises the stochastic bound up to constants.

    ``T = ceil(sqrt(N log N))``.

    Args:
        budget: the number N of training steps.

    Returns:
        The horizon T, at least 1.

    Raises:
        ValueError: the budget is below one.

    Example:
        >>> [stochastic_horizon(n) for n in (1, 1000, 5000, 10000)]
        [1, 84, 207, 304]
    """
    check_budget(budget)
    return max(1, math.ceil(math.sqrt(budget * math.log(budget))))


def deterministic_horizon(budget: int, *, learning_rate: float, strong_convexity: float) -> int:
    """The paper's horizon for full gradients.

    ``T = ceil(2 log N / (eta mu))``.

    Args:
        budget: the number N of training steps.
        learning_rate: eta, the step size of the model's training.
        strong_convexity: mu, a lower bound of the curvature of every domain's loss.

    Returns:
        The horizon T, at least 1. It may exceed the budget: the theorem then says nothing.

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
    """The theorems' step size of mirror descent.

    ``alpha = sqrt(log m / K) / size``. The theorems' size is ``G G_V / mu_hat``, an upper bound of every
    entry of the hypergradient.

    Args:
        rounds: the number K of weight updates.
        domains: the number m of domains.
        size: the size of the hypergradients.

    Returns:
        The step size alpha; 0 when there is one domain or nothing to follow (``size == 0``).

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


def shortest_horizon(constants: Constants, *, learning_rate: float) -> int:
    """``ceil(log 4 / (eta mu))``, from which on the deterministic theorem speaks.

    Args:
        constants: of the problem.
        learning_rate: eta.

    Returns:
        The horizon.
    """
    check_rate(constants, learning_rate)
    return max(1, math.ceil(math.log(4) / (learning_rate * constants.strong_convexity)))


def shortest_noisy_horizon(constants: Constants) -> int:
    """The horizon from which on the stochastic theorem speaks.

    The first T >= 3 with ``4 log T / (mu T) <= min(1/L_hat, mu/L^2, mu R-bar^2 / (9 sigma^2))``.

    Args:
        constants: of the problem.

    Returns:
        The horizon.

    Raises:
        ValueError: there is none, since nothing is to be learned.
    """
    mu, limit = constants.strong_convexity, constants.greatest_learning_rate
    if constants.noise > 0:
        limit = min(limit, mu * (3 * constants.wander) ** 2 / (9 * constants.noise**2))
    if limit <= 0:
        raise ValueError("no learning rate is low enough for the theorem: start and spread are zero")
    low, high = 3, 3  # log T / T falls from 3 on, so the first is found by halving

    def fits(horizon: int) -> bool:
        return 4 * math.log(horizon) / (mu * horizon) <= limit

    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def noisy_learning_rate(constants: Constants, *, horizon: float) -> float:
    """``4 log T / (mu T)``, the stochastic theorem's, but at most :attr:`Constants.greatest_learning_rate`.

    Short horizons, for which the theorem's is too high, are outside of the theorem.

    Args:
        constants: of the problem.
        horizon: T.

    Returns:
        eta.
    """
    wanted = 4 * math.log(max(horizon, 2)) / (constants.strong_convexity * horizon)
    return min(wanted, constants.greatest_learning_rate)


def check_budget(budget: int) -> None:
    """Refuse a budget that cannot be.

    Args:
        budget: N.

    Raises:
        ValueError: it is below one.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 training step, got {budget}")
