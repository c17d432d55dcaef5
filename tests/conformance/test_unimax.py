"""UniMax: published numbers, a transcription, and what must hold for any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scripted_training import Script, play
from mixwell import methods
from mixwell.methods import MethodContext
from mixwell.methods.unimax import UniMaxOptions, unimax

many_sizes = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=12)
budgets = st.floats(1.0, 1e8)
epochs = st.floats(0.1, 20.0)


@pytest.mark.parametrize(
    ("max_epochs", "shares"), [(2, [0.2] * 5), (1, [0.1, 0.2, 0.7 / 3, 0.7 / 3, 0.7 / 3])]
)
def test_golden_weights(max_epochs: int, shares: list[float]) -> None:
    assert unimax([100, 200, 300, 400, 500], 1000, max_epochs) == pytest.approx(shares, rel=1e-12)


def test_domain_order_is_preserved() -> None:
    assert unimax([500, 100, 300, 200, 400], 1000, 1) == pytest.approx([0.7 / 3, 0.1, 0.7 / 3, 0.2, 0.7 / 3])


def water_level(sizes: list[float], budget: float, max_epochs: float) -> np.ndarray:
    """The same by other means: ``min(level, N c)`` with the level that spends the budget, found by bisection."""
    caps = max_epochs * np.array(sizes)
    budget = min(budget, caps.sum())
    low, high = 0.0, caps.max()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(level, caps).sum() < budget else (low, level)
    taken = np.minimum(high, caps)
    return taken / taken.sum()


@given(many_sizes, budgets, epochs)
def test_weights_match_water_filling(sizes: list[float], budget: float, max_epochs: float) -> None:
    np.testing.assert_allclose(
        unimax(sizes, budget, max_epochs), water_level(sizes, budget, max_epochs), rtol=1e-6
    )


@given(many_sizes, budgets, epochs)
def test_weights_sum_to_one_and_limit_epochs(sizes: list[float], budget: float, max_epochs: float) -> None:
    shares = np.array(unimax(sizes, budget, max_epochs))
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert (shares > 0).all()
    order = np.argsort(sizes, kind="stable")
    assert (np.diff(shares[order]) >= -1e-12).all()  # never more of a smaller domain
    if budget <= max_epochs * sum(sizes):
        assert (shares * budget <= max_epochs * np.array(sizes) * (1 + 1e-9)).all()
    else:  # all are used up: each is repeated equally often
        np.testing.assert_allclose(shares, np.array(sizes) / sum(sizes), rtol=1e-9)


@given(st.permutations(range(5)))
def test_invariant_to_domain_order(order: list[int]) -> None:
    sizes = [10.0, 10.0, 70.0, 200.0, 900.0]
    expected = unimax(sizes, 500, 2)
    assert unimax([sizes[j] for j in order], 500, 2) == pytest.approx([expected[j] for j in order], rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "budget", "max_epochs"),
    [([], 1, 1), ([1, 0], 1, 1), ([1, float("nan")], 1, 1), ([1], 0, 1), ([1], 1, float("inf"))],
)
def test_nonpositive_arguments_raise(sizes: list[float], budget: float, max_epochs: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        unimax(sizes, budget, max_epochs)


def test_recipe_keeps_weights_constant() -> None:
    names = ("d0", "d1", "d2")
    rows = {"d0": 10, "d1": 400, "d2": 100}
    options = UniMaxOptions()
    recipe = methods.find("unimax").recipe(
        MethodContext(domains=names, rows=rows, batch_rows=8, steps=30, options=options)
    )
    # 240 rows, at most four epochs: 40 of the first, and the 200 that are left for the other two
    assert recipe.weights == pytest.approx({"d0": 1 / 6, "d1": 5 / 12, "d2": 5 / 12})
    assert recipe.weights is not None
    played = play(
        Script.random(0, steps=6),
        recipe.signal,
        recipe.update,
        horizon=2,
        weights=list(recipe.weights.values()),
    )
    np.testing.assert_allclose(played.weights, np.tile([1 / 6, 5 / 12, 5 / 12], (4, 1)), rtol=1e-12)
