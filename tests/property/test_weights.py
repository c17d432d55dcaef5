"""Weights, updates and constraints stay on the simplex through any finite input, and are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.toy_problems import names
from mixwell.reference import theory
from mixwell.simplex import constraints, horizons, updates
from mixwell.simplex.constraints import Cap, Floor, PriorPull
from mixwell.simplex.weights import Weights

LARGEST = float(np.finfo(np.float64).max)
any_float = st.floats(-LARGEST, LARGEST)
sizes = st.integers(1, 8)


def scores_of(m: int):
    return arrays(np.float64, m, elements=any_float)


def log_weights(m: int):
    return arrays(np.float64, m, elements=st.floats(-1e300, 1e300))


@st.composite
def boxes(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-weights and feasible bounds."""
    m = draw(st.integers(2, 7))
    log = draw(arrays(np.float64, m, elements=st.floats(-800, 0)))
    low = draw(arrays(np.float64, m, elements=st.floats(0, 1 / m)))
    room = draw(arrays(np.float64, m, elements=st.floats(0, 1)))
    high = np.minimum(1.0, low + room)
    assume(high.sum() >= 1 + 1e-9)
    return log, low, high


@given(st.data(), sizes, st.floats(1e-300, LARGEST))
def test_mirror_descent_with_any_finite_input(data, m: int, alpha: float) -> None:
    weights = Weights(names(m))
    for _ in range(3):
        step = updates.mirror_step(weights.log, data.draw(scores_of(m)), alpha)
        weights.advance(step, steps=1)
        assert np.isfinite(weights.log).all()
        assert (weights.values > 0).all()
        assert weights.values.sum() == pytest.approx(1)
        assert sum(weights.average.values()) == pytest.approx(1)


@given(st.data(), st.integers(2, 8))
def test_auto_step_sizes_are_finite_and_bounded(data, m: int) -> None:
    update = updates.MirrorDescent("auto")
    for k in range(4):
        # beyond 1e300 the step size is subnormal and has few digits
        scores = np.clip(data.draw(scores_of(m)), -1e300, 1e300)
        alpha = update.next_step_size(scores, updates.RoundContext(k, 4))
        assert math.isfinite(alpha)
        assert alpha >= 0
        moved = alpha * (scores / 2 - (scores / 2 / m).sum()) * 2
        assert np.abs(moved).max() <= updates.FACTOR * math.sqrt(math.log(m) / 4) * (1 + 1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_scores_keep_weights(score: float, m: int) -> None:
    """Though they differ from their mean by rounding."""
    update = updates.MirrorDescent("auto")
    for k in range(3):
        assert update.next_step_size(np.full(m, score), updates.RoundContext(k, 3)) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), st.floats(-5, 5), st.floats(0.1, 3))
def test_mirror_descent_matches_paper(initial: list[float], shift: float, alpha: float) -> None:
    weights = Weights(names(len(initial)), initial)
    scores = np.linspace(-1, 1, len(initial)) + shift
    expected = weights.values * np.exp(-alpha * scores)
    weights.advance(updates.mirror_step(weights.log, scores, alpha), steps=1)
    np.testing.assert_allclose(weights.values, expected / expected.sum(), rtol=1e-12)


@example((np.array([0.0, -37.0]), np.array([0.5, 0.0]), np.ones(2)))  # 1 - exp(-37) is 1 in floating point
@given(boxes())
def test_projection_is_feasible_and_optimal(box) -> None:
    """The KL projection is ``clip(s q, low, high)``; these are its optimality conditions."""
    log, low, high = box
    m = len(log)
    bounded = [
        Floor(dict(zip(names(m), low, strict=True))),
        Cap(dict(zip(names(m), high, strict=True))),
    ]
    projected = constraints.apply_constraints(names(m), log, bounded, step_size=1.0)
    w = np.exp(projected)
    assert w.sum() == pytest.approx(1, abs=1e-9)
    assert (w >= low * (1 - 1e-9)).all()
    assert (w <= high * (1 + 1e-9)).all()
    with np.errstate(divide="ignore"):
        shift = projected - log  # log s for free domains, above it at the floor, below it at the cap
        free = (projected > np.log(low) + 1e-7) & (projected < np.log(high) - 1e-7)
        pinned = high - low < 1e-6  # at both bounds at once
        at_floor = (projected <= np.log(np.maximum(low, 1e-300)) + 1e-7) & ~free & ~pinned
        at_cap = (projected >= np.log(high) - 1e-7) & ~free & ~at_floor & ~pinned
    if free.any():
        level = shift[free]
        assert np.ptp(level) < 1e-6 * max(1.0, np.abs(level).max())
        assert (shift[at_floor] >= level.min() - 1e-5).all()
        assert (shift[at_cap] <= level.max() + 1e-5).all()


@given(boxes())
def test_projection_is_idempotent(box) -> None:
    log, low, high = box
    m = len(log)
    bounded = [Floor(dict(zip(names(m), low, strict=True))), Cap(dict(zip(names(m), high, strict=True)))]
    once = constraints.constrain(names(m), log, bounded)
    assume((once > 0).all())
    np.testing.assert_allclose(constraints.constrain(names(m), np.log(once), bounded), once, rtol=1e-6)


@given(st.data(), st.integers(2, 6))
def test_constraints_with_any_finite_input(data, m: int) -> None:
    log = data.draw(log_weights(m))
    parts = [Floor(0.01), Cap(0.9), PriorPull([1.0] * m, strength=data.draw(st.floats(0, 1e6)))]
    w = np.exp(constraints.apply_constraints(names(m), log, parts, step_size=data.draw(st.floats(1e-6, 1e6))))
    assert np.isfinite(w).all()
    assert w.sum() == pytest.approx(1)
    assert w.min() >= 0.01 * (1 - 1e-9)
    assert w.max() <= 0.9 * (1 + 1e-9)


def test_constrained_step_minimizes_its_objective() -> None:
    """Against a fine grid: ``alpha <h, w> + KL(w || w_k) + alpha lambda KL(w || p)`` over the bounded simplex."""
    rng = np.random.default_rng(0)
    start, prior, h = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), rng.normal(size=3)
    alpha, strength = 1.7, 0.4
    parts = [Floor(0.15), Cap({"d2": 0.4}), PriorPull(prior.tolist(), strength)]
    got = np.exp(
        constraints.apply_constraints(
            names(3), updates.mirror_step(np.log(start), h, alpha), parts, step_size=alpha
        )
    )

    def objective(w: np.ndarray) -> np.ndarray:
        def kl(q: np.ndarray) -> np.ndarray:
            return (w * np.log(w / q)).sum(-1)

        return alpha * w @ h + kl(start) + alpha * strength * kl(prior)

    a, b = np.meshgrid(*[np.linspace(0.15, 0.7, 1101)] * 2)
    grid = np.stack([a, b, 1 - a - b], axis=-1).reshape(-1, 3)
    grid = grid[(grid >= 0.15 - 1e-12).all(1) & (grid[:, 2] <= 0.4 + 1e-12)]
    best = grid[np.argmin(objective(grid))]
    np.testing.assert_allclose(got, best, atol=1e-3)
    assert objective(got) <= objective(grid).min() + 1e-9


def test_strong_pull_reaches_prior() -> None:
    prior = [0.7, 0.2, 0.1]
    log = constraints.apply_constraints(
        names(3), np.log([0.1, 0.1, 0.8]), [PriorPull(prior, 1e9)], step_size=1.0
    )
    np.testing.assert_allclose(np.exp(log), prior, rtol=1e-6)


@given(st.integers(1, 10**9))
def test_default_horizon_fits_budget(budget: int) -> None:
    length = horizons.resolve(None, budget)
    assert 1 <= length <= budget
    if budget > 1:
        # Half of the paper's, ceil(sqrt(N log N) / 2).
        assert (length - 1) ** 2 < budget * math.log(budget) / 4 <= length**2 * (1 + 1e-12)


def test_horizons_match_paper() -> None:
    assert [theory.stochastic_horizon(n) for n in (1000, 5000, 10000)] == [84, 207, 304]
    with pytest.raises(ValueError, match="exceeds the budget of 100"):
        horizons.resolve(horizons.DeterministicHorizon(learning_rate=0.01, strong_convexity=1.0), 100)
    with pytest.raises(ValueError, match="must be positive, got 0 and 1"):
        horizons.resolve(horizons.DeterministicHorizon(learning_rate=0, strong_convexity=1), 100)


def test_log_weights_recover_from_below_float_range() -> None:
    weights = Weights(["a", "b"])
    weights.advance(updates.mirror_step(weights.log, np.array([900.0, 0.0]), 1.0), steps=1)
    assert weights["a"] > 0
    weights.advance(updates.mirror_step(weights.log, np.array([-899.0, 0.0]), 1.0), steps=1)
    assert weights.log[0] - weights.log[1] == pytest.approx(-1.0)
