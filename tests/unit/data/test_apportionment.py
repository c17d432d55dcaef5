"""Whole numbers of rows that follow shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixwell.data.apportionment import ROUNDING, Apportionment, within


def shares(m: int) -> st.SearchStrategy[np.ndarray]:
    positive = st.lists(st.floats(1e-6, 1.0), min_size=m, max_size=m)
    return positive.map(lambda values: np.array(values) / sum(values))


@st.composite
def constant(draw: st.DrawFn) -> tuple[int, int, np.ndarray]:
    m = draw(st.integers(1, 9))
    least = draw(st.integers(0, 2))
    total = draw(st.integers(max(1, m * least), 40 + m * least))
    p = draw(shares(m))
    return total, least, least / total + (1 - m * least / total) * p


@settings(deadline=None)
@given(constant())
def test_constant_fractions_give_counts_within_one_row(case) -> None:
    total, least, p = case
    batches = Apportionment(total, len(p), least=least)
    seen = np.zeros(len(p))
    for step in range(1, 40):
        counts = np.array(batches.next(p))
        assert counts.sum() == total
        assert counts.min() >= least
        seen += counts
        assert np.abs(seen - step * total * p).max() < 1 + 1e-9


@settings(deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(0, 2))
def test_changing_fractions_are_followed_within_one_row(data, m, least) -> None:
    room = max(least, 1) + 1
    total = data.draw(st.integers(m * room, m * room + 40))
    batches = Apportionment(total, m, least=least)
    seen, due = np.zeros(m), np.zeros(m)
    for p in data.draw(st.lists(shares(m), min_size=1, max_size=25)):
        p = room / total + (1 - m * room / total) * p
        counts = np.array(batches.next(p))
        assert counts.sum() == total
        assert counts.min() >= least
        seen, due = seen + counts, due + total * p
        assert np.abs(seen - due).max() < 1 + 1e-9


@settings(deadline=None)
@given(st.data(), st.integers(1, 8))
def test_any_changes_keep_sum_and_are_compensated(data, m) -> None:
    total = data.draw(st.integers(1, 12))
    batches = Apportionment(total, m)
    seen, due = np.zeros(m), np.zeros(m)
    for p in data.draw(st.lists(shares(m), min_size=1, max_size=30)):
        counts = np.array(batches.next(p))
        assert counts.sum() == total
        assert counts.min() >= 0
        seen, due = seen + counts, due + total * p
    # No rule can stay below about log m; this one must not be far above.
    assert np.abs(seen - due).max() < 1 + np.log(m) + 1e-9
    uniform = np.full(m, 1 / m)
    for _ in range(8 * m):
        seen, due = seen + np.array(batches.next(uniform)), due + total * uniform
    assert np.abs(seen - due).max() < 1 + 1e-9


def test_exhausted_domain_passes_rows_to_others() -> None:
    batches = Apportionment(10, 3, least=1)
    assert batches.next(np.array([0.8, 0.1, 0.1]), most=[3, 9, 0]) == [3, 7, 0]


def test_too_few_rows_in_total_give_smaller_batch() -> None:
    assert Apportionment(10, 2).next(np.array([0.5, 0.5]), most=[2, 1]) == [2, 1]


def literal(carry: np.ndarray, shares: np.ndarray, total: int, least: int, most: np.ndarray) -> np.ndarray:
    """The counts as their definition has it: row by row, and everything anew."""
    targets = total * shares
    due = carry + targets
    whole = np.floor(targets + ROUNDING).astype(np.int64)
    fractions = np.maximum(targets - whole, 0.0)
    most = np.minimum(most, np.where(whole < 1, 1, total))
    low = np.minimum(np.minimum(max(least, 1), whole), most)
    counts = np.clip(np.floor(due + ROUNDING).astype(np.int64), low, most)
    while counts.sum() < min(total, most.sum()):
        left, able = due - counts, counts < most
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            deadline = np.ceil((1 - left) / fractions - ROUNDING)
        batches = np.where((left > ROUNDING) & (fractions > 0), deadline, np.inf)
        batches = np.where(able, batches, np.inf)
        first = able & (batches == batches.min())
        counts[np.where(first, left, -np.inf).argmax()] += 1
    while counts.sum() > total:
        counts[np.where(counts > low, due - counts, np.inf).argmin()] -= 1
    return counts


@settings(deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(0, 2))
def test_counts_and_carry_match_definition(data, m, least) -> None:
    total = data.draw(st.integers(max(1, m * least), 12 + m * least))
    batches, carry = Apportionment(total, m, least=least), np.zeros(m)
    for p in data.draw(st.lists(shares(m), min_size=1, max_size=4)):
        zeros = np.array(
            data.draw(st.lists(st.sampled_from([1.0, 1.0, 0.0, 1e-320]), min_size=m, max_size=m))
        )
        p = p * zeros / (p * zeros).sum() if (p * zeros).sum() > 1e-9 else p
        limits = st.lists(st.integers(0, total), min_size=m, max_size=m)
        for most in data.draw(st.lists(st.none() | limits, min_size=1, max_size=6)):
            counts = literal(carry, p, total, least, np.full(m, total) if most is None else np.array(most))
            carry = carry + total * p - counts
            assert batches.next(p, most=most) == counts.tolist()
            assert batches.carry == carry.tolist()


def test_large_target_does_not_delay_others() -> None:
    """Its deadline was that of its whole target, so that it looked urgent in every batch: 1.3 rows behind."""
    rng = np.random.default_rng(1)
    for _ in range(100):
        total = int(rng.integers(2, 6))
        targets = np.append(1 + rng.random() * 0.05, rng.dirichlet(np.full(5, 0.5)) * (total - 1))
        p = targets / targets.sum()
        batches, given = Apportionment(total, 6), np.zeros(6)
        for step in range(1, 100):
            given += batches.next(p)
            assert np.abs(given - step * total * p).max() <= 1 + 1e-6


def test_too_small_batch_raises() -> None:
    with pytest.raises(ValueError, match="a batch of 4 rows has no room for 2 of each of 3 domains"):
        Apportionment(4, 3, least=2)


@settings(deadline=None)
@given(st.data(), st.integers(1, 8))
def test_bounds_hold_and_free_fractions_stay_proportional(data, m) -> None:
    p = data.draw(shares(m))
    low = data.draw(st.floats(0, 1)) * np.full(m, 1 / m)
    high = np.maximum(np.array(data.draw(st.lists(st.floats(0, 1), min_size=m, max_size=m))), low)
    moved = within(p, low, high)
    assert (moved <= high + 1e-9).all()
    assert moved.sum() == pytest.approx(min(1.0, high.sum()))
    free = (moved > low + 1e-6) & (moved < high - 1e-6)
    if free.sum() > 1:
        ratio = moved[free] / p[free]
        assert ratio == pytest.approx(np.full(len(ratio), ratio[0]), rel=1e-4)
