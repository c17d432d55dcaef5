"""A small domain is held back while much of the run is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mixwell
from helpers.scripted_training import Script, names, play
from mixwell import Cap, EpochCap, EpochPace, Floor, Hypergradient, MirrorDescent
from mixwell.methods.mixwell import MixwellOptions
from mixwell.simplex.constraints import limits
from mixwell.simplex.repetition import EPOCHS_AHEAD
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.weight_updater import WeightUpdater
from mixwell.training import builder, config_io

SIZES = {"a": 50, "b": 3000}


def highs(pace: EpochPace, *, after: int) -> list[float]:
    pace.at_step(after)
    return pace.bounds(["a", "b"])[1].tolist()


def test_bound_is_weight_for_epochs_in_remaining_steps() -> None:
    pace = EpochPace(SIZES, 4, batch_size=20, budget=100)
    for after in (0, 40, 80):
        rows_of_a = highs(pace, after=after)[0] * 20 * (100 - after)
        assert rows_of_a == pytest.approx(4 * 50)
    assert highs(pace, after=95) == [1.0, 1.0]  # 100 rows are left
    assert highs(pace, after=100) == [1.0, 1.0]


def test_bound_is_multiple_of_row_fraction_in_long_runs() -> None:
    pace = EpochPace({"a": 50, "b": 950}, 4, batch_size=100, budget=100)  # ten epochs of everything
    assert highs(pace, after=0) == pytest.approx([4 * 0.05, 1.0])


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    st.floats(1, 50),
    st.integers(1, 500),
    st.integers(1, 300),
)
def test_bounds_are_feasible_and_nondecreasing(
    sizes: list[int], epochs: float, batch: int, budget: int
) -> None:
    domains = names(len(sizes))
    pace = EpochPace(dict(zip(domains, sizes, strict=True)), epochs, batch_size=batch, budget=budget)
    before = np.zeros(len(sizes))
    for after in sorted({0, budget // 2, budget - 1, budget}):
        pace.at_step(after)
        _, high = limits(domains, [pace])
        assert high.sum() >= 1 - 1e-9
        assert (high > 0).all()
        assert (high >= before - 1e-12).all()
        before = high


def test_domains_of_equal_size_are_not_limited() -> None:
    domains = names(16)
    pace = EpochPace(dict.fromkeys(domains, 3), batch_size=64, budget=10_000)
    assert (pace.bounds(domains)[1] == 1).all()


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], [0.1, 1.0]),
        ([Floor({"a": 0.3})], [0.3, 1.0]),  # the floor is kept
        ([Cap({"b": 0.6})], [0.4, 0.6]),  # the two must sum to one
        ([Cap({"a": 0.05})], [0.05, 1.0]),
        ([EpochCap(SIZES, {"a": 1.0}, batch_size=20, budget=100)], [51 / 2000, 1.0]),
    ],
)
def test_yields_to_other_bounds(others: list[Any], expected: list[float]) -> None:
    pace = EpochPace(SIZES, 4, batch_size=20, budget=100)
    assert limits(["a", "b"], [pace, *others])[1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0.5}, "at least 1, got 0.5"),
        ({"epochs": float("nan")}, "got nan"),
        ({"batch_size": 0}, "got 0 and 100"),
        ({"budget": 0}, "got 20 and 0"),
        ({"rows": {"a": 0, "b": 5}}, "a must have rows"),
    ],
)
def test_invalid_arguments_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochPace(**{"rows": SIZES, "epochs": 4, "batch_size": 20, "budget": 100, **wrong})


def test_domain_without_size_is_named() -> None:
    with pytest.raises(ValueError, match="c is missing"):
        EpochPace(SIZES, batch_size=20, budget=100).bounds(["a", "c"])


def test_preferred_domain_follows_bound() -> None:
    """A constant signal for the small domain: its weight is the bound of every round, until that lets it go."""
    steps, horizon, batch = 60, 5, 10
    gradients = np.tile(np.array([[1.0, 0.0], [-1.0, 0.0]]), (steps, 1, 1))
    script = Script(np.ones((steps, 2)), gradients, validation=np.tile([1.0, 0.0], (steps, 1)))
    pace = EpochPace({"d0": 12, "d1": 5000}, 10, batch_size=batch, budget=steps)
    played = play(script, Hypergradient(points=1), MirrorDescent(50.0), horizon=horizon, constraints=[pace])
    left = batch * (steps - horizon * np.arange(len(played.weights)))
    expected = np.minimum(1.0, 10 * 12 / np.maximum(left, 1))
    np.testing.assert_allclose(played.weights[:-1, 0], expected[:-1], rtol=1e-9)
    assert played.weights[0, 0] == pytest.approx(0.2)
    assert played.mixer.limits == {"d0": (0.0, 1.0), "d1": (0.0, 1.0)}  # nothing is left to be held back for
    assert played.weights[-1, 0] > 0.99


def test_tightened_bound_holds_without_scores() -> None:
    cap = EpochCap(SIZES, {"a": 1.0}, batch_size=20, budget=10)
    outer, clock = WeightUpdater(None, [cap]), RoundClock(5, budget=10, warmup=0)
    weights = outer.initial_weights(["a", "b"], [0.2, 0.8])
    assert weights["a"] == pytest.approx(0.2)
    for _ in range(5):
        clock.tick()
    cap.record_usage({"a": 46}, steps_done=5)
    outer.apply(weights, None, clock)
    assert weights["a"] == pytest.approx(5 / 100)  # four rows are left, and one that counts may be ahead by


def test_resumed_limits_match_last_update(tmp_path: Any) -> None:
    def new() -> mixwell.Mixer:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        pace = EpochPace({"a": 4, "b": 400}, 3, batch_size=6, budget=12)
        return mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ["a", "b"],
            budget=12,
            horizon=4,
            constraints=[pace],
        )

    mixer = new()
    module: Any = mixer._parameters.model
    for _ in range(6):
        for name in ("a", "b"):
            with mixer.domain(name, rows=3):
                module(torch.ones(3, 2)).mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                module(torch.ones(1, 2)).mean().backward()
    assert mixer.limits["a"][1] == pytest.approx(12 / 48)
    mixer.save(tmp_path / "state")
    again = new()
    again.load(tmp_path / "state")
    assert again.limits == mixer.limits


def test_constraints_are_reset_between_runs() -> None:
    pace = EpochPace(SIZES, 4, batch_size=20, budget=100)
    pace.at_step(99)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], budget=100, constraints=[pace])
    assert mixer.weights["a"] == pytest.approx(0.1)
    assert mixer.limits["a"] == (0.0, pytest.approx(0.1))


def config(tmp_path: Any, **mixer: Any) -> Any:
    for name, length in (("a", 2000), ("b", 400_000), ("v", 3000)):
        (tmp_path / f"{name}.txt").write_text("text " * (length // 5))
    plain = {
        "domains": {"a": str(tmp_path / "a.txt"), "b": str(tmp_path / "b.txt")},
        "validation": str(tmp_path / "v.txt"),
        "steps": 100,
        "mixer": mixer,
    }
    return config_io.validate_config(plain, where="test")


def paces(made: Any) -> list[EpochPace]:
    recipe = mixwell.methods.find(made.mixer.method).recipe(
        builder.method_context(made, {"a": 31, "b": 6250})
    )
    return [one for one in recipe.constraints if isinstance(one, EpochPace)]


def test_only_default_method_uses_epoch_pace(tmp_path: Any) -> None:
    assert MixwellOptions().epochs_ahead == EPOCHS_AHEAD
    (pace,) = paces(config(tmp_path))
    assert pace.epochs == EPOCHS_AHEAD
    assert pace.bounds(["a", "b"])[1][0] == pytest.approx(16 * 31 / 3200)
    (pace,) = paces(config(tmp_path, options={"epochs_ahead": 4}))
    assert pace.epochs == 4
    assert paces(config(tmp_path, options={"epochs_ahead": None})) == []
    assert paces(config(tmp_path, method="group-dro")) == []


def test_from_method_uses_epoch_pace_if_sizes_given() -> None:
    def kinds(**sizes: Any) -> list[type]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mixer = mixwell.Mixer.from_method("mixwell", model, optimizer, ["a", "b"], budget=100, **sizes)
        return [type(one) for one in mixer._round.updater.constraints]

    assert kinds(rows=SIZES, batch_rows=20) == [EpochPace]
    assert kinds() == []
