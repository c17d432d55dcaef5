"""The bounds against the paper's formulas written out, and against each other."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixwell.reference import theory
from mixwell.reference.theory import Constants

PLAIN = Constants(
    domains=3,
    gradient=2.0,
    smoothness=4.0,
    strong_convexity=1.0,
    validation_gradient=3.0,
    validation_smoothness=1.5,
    least_curvature=0.5,
    greatest_curvature=5.0,
    curvature_error=0.1,
    spread=0.7,
    start=2.0,
    noise=1.2,
)


def test_deterministic_bound_matches_paper() -> None:
    # Theorem "thm2" with the numbers put in by hand: R = 2 max(2, 9 * 0.7) = 12.6.
    eta, T, N = 0.05, 40, 4000
    first = 3 * 2 * 3 * math.sqrt(math.log(3)) / (2 * 0.5 * math.sqrt(100))
    second = 2 * (1 - 0.025) ** 39 * (0.05 * 40 * (4 * 3 + 1.5 * 2) * 12.6 + 2 * 3 / 1.0)
    third = 2 * 0.1 * 2 * 3 / 0.25
    bound = theory.deterministic_bound(PLAIN, budget=N, horizon=T, learning_rate=eta)
    assert bound.optimization == pytest.approx(first)
    assert bound.horizon_bias == pytest.approx(second)
    assert bound.curvature == pytest.approx(third)
    assert bound.total == pytest.approx(first + second + third)
    error = theory.hypergradient_error_bound(PLAIN, horizon=T, learning_rate=eta)
    assert error == pytest.approx((second + third) / 2)


def test_stochastic_bound_matches_proof() -> None:
    eta, T, N = 0.04, 60, 6000
    noisy, noisy_validation = math.sqrt(4 + 1.44), math.sqrt(9 + 1.44)
    first = 1.5 * noisy * noisy_validation * math.sqrt(math.log(3)) / (0.5 * 10)
    fading = (1 - 0.02) ** 59
    second = 2 * 3 * 6.3 * (4 * 3 * 0.04 * 60 + 1.5 * noisy / 0.5) * fading
    second += 2 * 3 * 2 / 1.0 * (1 - 0.04) ** 60
    second += 2 * 0.2 * 1.2 * (4 * 3 / 1.0 + 1.5 * noisy / 0.5)
    bound = theory.stochastic_bound(PLAIN, budget=N, horizon=T, learning_rate=eta)
    assert bound.optimization == pytest.approx(first)
    assert bound.horizon_bias == pytest.approx(second)
    assert bound.curvature == pytest.approx(2 * 0.1 * 2 * 3 / 0.25)


@pytest.mark.parametrize("budget", [50, 777, 20_000])
def test_solvers_find_minimum_bound(budget: int) -> None:
    eta = 0.9 * PLAIN.greatest_learning_rate
    first = theory.shortest_horizon(PLAIN, learning_rate=eta)
    if first > budget:
        with pytest.raises(ValueError, match=f"horizons of at least {first}"):
            theory.best_deterministic_horizon(PLAIN, budget=budget, learning_rate=eta)
        return
    fixed = min(
        range(first, budget + 1),
        key=lambda t: (
            theory.deterministic_bound(PLAIN, budget=budget, horizon=t, learning_rate=eta).reducible
        ),
    )
    assert theory.best_deterministic_horizon(PLAIN, budget=budget, learning_rate=eta) == fixed
    late = theory.shortest_noisy_horizon(PLAIN)
    if late > budget:
        with pytest.raises(ValueError, match=f"horizons of at least {late}"):
            theory.best_stochastic_horizon(PLAIN, budget=budget)
        return
    noisy = min(
        range(late, budget + 1),
        key=lambda t: theory.stochastic_bound(PLAIN, budget=budget, horizon=t).reducible,
    )
    found = theory.best_stochastic_horizon(PLAIN, budget=budget)
    values = [theory.stochastic_bound(PLAIN, budget=budget, horizon=t).reducible for t in (noisy, found)]
    assert values[1] == pytest.approx(values[0], rel=1e-6)


def test_best_horizons_grow_as_in_theorems() -> None:
    quiet = replace(PLAIN, noise=0.0)
    eta = 0.9 * PLAIN.greatest_learning_rate
    fixed = [
        theory.best_deterministic_horizon(quiet, budget=10**k, learning_rate=eta) for k in (5, 6, 7, 8, 9)
    ]
    steps = [b - a for a, b in pairwise(fixed)]
    assert max(steps) - min(steps) <= 0.1 * max(steps)  # linear in log N
    noisy = [theory.best_stochastic_horizon(PLAIN, budget=10**k) for k in (6, 8, 10)]
    for k, horizon in zip((6, 8, 10), noisy, strict=True):
        N = 10**k
        # sqrt(N log N), up to a constant that the problem sets once
        assert horizon / math.sqrt(N * math.log(N)) == pytest.approx(
            noisy[0] / math.sqrt(10**6 * math.log(10**6)), rel=0.15
        )


@given(st.integers(1, 10**6), st.integers(2, 10**5))
def test_bound_terms_with_larger_budget(budget: int, horizon: int) -> None:
    one = theory.deterministic_bound(PLAIN, budget=budget, horizon=horizon, learning_rate=0.05)
    more = theory.deterministic_bound(PLAIN, budget=2 * budget, horizon=horizon, learning_rate=0.05)
    assert more.optimization < one.optimization
    assert more.horizon_bias == one.horizon_bias
    assert min(one.optimization, one.horizon_bias, one.curvature) >= 0


def test_shortest_noisy_horizon_is_minimal() -> None:
    first = theory.shortest_noisy_horizon(PLAIN)
    # mu / L^2 = 1/16 is the least of the three limits
    assert 4 * math.log(first) / first <= 1 / 16 < 4 * math.log(first - 1) / (first - 1)
    noisier = replace(PLAIN, noise=500.0)
    assert theory.shortest_noisy_horizon(noisier) > first
    with pytest.raises(ValueError, match="no learning rate is low enough"):
        theory.shortest_noisy_horizon(replace(PLAIN, start=0.0, spread=0.0))


@pytest.mark.parametrize("rate", [-1.0, 0.0, 1.5, math.nan])
def test_invalid_learning_rates_raise(rate: float) -> None:
    for call in (
        lambda: theory.shortest_horizon(PLAIN, learning_rate=rate),
        lambda: theory.deterministic_bound(PLAIN, budget=10, horizon=2, learning_rate=rate),
        lambda: theory.stochastic_bound(PLAIN, budget=10, horizon=2, learning_rate=rate),
    ):
        with pytest.raises(ValueError, match="the learning rate must be above 0 and at most 1/mu = 1"):
            call()
    with pytest.raises(ValueError, match="at least 1 round"):
        theory.mirror_step_size(rounds=0, domains=3, size=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domains": 0}, "at least 1 domain"),
        ({"strong_convexity": 0.0}, "strong_convexity must be positive"),
        ({"strong_convexity": 5.0}, "cannot exceed smoothness"),
        ({"least_curvature": 6.0}, "cannot exceed greatest_curvature"),
        ({"noise": -1.0}, "noise must be finite and not negative"),
        ({"gradient": math.inf}, "gradient must be finite"),
    ],
)
def test_contradictory_constants_raise(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)
