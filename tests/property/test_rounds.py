"""Rounds divide the steps of a budget: every step is in one, and none is much shorter than the horizon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixwell.simplex.rounds import RoundClock, round_count


def lengths(clock: RoundClock, steps: int) -> list[int]:
    """Return the lengths of the rounds that end in the next steps."""
    found: list[int] = []
    for _ in range(steps):
        clock.tick()
        if clock.in_round and clock.round_done:
            found.append(clock.round_length)
            clock.next_round()
    return found


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, int, int]:
    budget = draw(st.integers(1, 600))
    return draw(st.integers(1, budget)), budget, draw(st.integers(0, budget - 1))


@given(settings())
def test_rounds_cover_each_step_once_and_none_is_short(setting: tuple[int, int, int]) -> None:
    horizon, budget, warmup = setting
    clock = RoundClock(horizon, budget=budget, warmup=warmup)
    announced = clock.rounds
    found = lengths(clock, budget)
    assert sum(found) == budget - warmup
    assert announced == len(found) == round_count(budget - warmup, horizon)
    assert all(length == horizon for length in found[:-1])
    assert 2 * found[-1] < 3 * horizon
    # Where warm-up leaves less than half of a horizon, one round has all of it.
    assert 2 * found[-1] >= horizon or found == [budget - warmup]


@given(settings(), st.data())
def test_rounds_are_the_same_after_resuming(setting: tuple[int, int, int], data: st.DataObject) -> None:
    horizon, budget, warmup = setting
    whole, first, second = (RoundClock(horizon, budget=budget, warmup=warmup) for _ in range(3))
    stop = data.draw(st.integers(0, budget))
    found = lengths(first, stop)
    second.load_state(first.state())
    assert found + lengths(second, budget - stop) == lengths(whole, budget)


@pytest.mark.parametrize(
    ("horizon", "budget", "expected"),
    [(49, 400, [49] * 7 + [57]), (42, 1000, [42] * 23 + [34]), (5, 12, [5, 7]), (2, 5, [2, 2, 1])],
)
def test_remainder_below_half_of_horizon_joins_round_before(
    horizon: int, budget: int, expected: list[int]
) -> None:
    assert lengths(RoundClock(horizon, budget=budget, warmup=0), budget) == expected
