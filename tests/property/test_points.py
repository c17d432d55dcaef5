"""Validation points of a round: where they are, how many rows they take, and what their scores say together."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixwell import ConstantWeights, Hypergradient
from mixwell.mixer.scores import RoundScores
from mixwell.reference import theory
from mixwell.simplex.rounds import VALIDATION_FRACTION, trace_interval, validation_points, validation_rows

lengths, counts = st.integers(1, 5000), st.integers(1, 64)
spans = st.floats(0.01, 1.0)


@given(lengths, counts, spans)
def test_points_increase_in_span_and_end_with_round(length: int, points: int, span: float) -> None:
    found = validation_points(length, points=points, span=span)
    assert all(early < late for early, late in itertools.pairwise(found))
    assert found[-1] == length
    assert len(found) == min(points, math.ceil(span * length))
    assert found[0] > length - math.ceil(span * length)


@given(lengths, counts, spans)
def test_points_are_evenly_spaced(length: int, points: int, span: float) -> None:
    found = validation_points(length, points=points, span=span)
    gaps = np.diff([length - math.ceil(span * length), *found])
    assert gaps.max() - gaps.min() <= 1


def test_signals_report_their_validation_points() -> None:
    assert Hypergradient().validation_points(84) == validation_points(84, points=8, span=0.5)
    assert Hypergradient(points=1, span=0.1).validation_points(84) == (84,)
    assert ConstantWeights().validation_points(84) == ()
    assert Hypergradient(window=5).validation_points(49) == (45, 46, 47, 48, 49)  # traces are zero before
    assert Hypergradient(window=60).validation_points(84) == validation_points(84)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"points": 0}, "points must be a whole number of at least 1, got 0"),
        ({"points": 2.5}, "points must be a whole number of at least 1, got 2.5"),
        ({"span": 0.0}, r"span must be a part of the round, in \(0, 1\], got 0.0"),
        ({"span": 1.5}, r"span must be a part of the round, in \(0, 1\], got 1.5"),
        ({"span": math.nan}, r"span must be a part of the round, in \(0, 1\], got nan"),
    ],
)
def test_invalid_points_raise(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hypergradient(**wrong)


@given(st.integers(100, 100_000), st.integers(1, 512), st.sampled_from([1, 4, 8, 16]))
def test_validation_takes_at_most_five_percent_of_round(budget: int, batch_rows: int, points: int) -> None:
    length = theory.stochastic_horizon(budget)
    due = len(validation_points(length, points=points))
    rows = validation_rows(batch_rows, steps=length, points=due)
    assert rows >= 1
    # Each gradient has a row at least, whatever that is of the round.
    assert rows * due <= max(VALIDATION_FRACTION * length * batch_rows, due)
    # Nor does rounding leave much of it out.
    assert (rows + 1) * due > VALIDATION_FRACTION * length / trace_interval(length) * batch_rows


@given(st.integers(1, 19), st.integers(1, 512), st.integers(1, 10))
def test_short_round_takes_one_validation_batch(length: int, batch_rows: int, points: int) -> None:
    due = len(validation_points(length, points=points))
    assert validation_rows(batch_rows, steps=length, points=due) == max(1, batch_rows // due)


# ------------------------------------------------------------------------------------- scores of several points

values = st.floats(-1e6, 1e6)


@st.composite
def kept(draw) -> tuple[list[int], np.ndarray]:
    """Steps of points, and the scores at each."""
    steps = sorted(draw(st.lists(st.integers(1, 500), min_size=2, max_size=9, unique=True)))
    m = draw(st.integers(1, 5))
    rows = draw(st.lists(st.lists(values, min_size=m, max_size=m), min_size=len(steps), max_size=len(steps)))
    return steps, np.array(rows)


def scores_at(steps: list[int], scores: np.ndarray) -> RoundScores:
    found = RoundScores()
    for step, row in zip(steps, scores, strict=True):
        found.add(step, row)
    return found


@given(kept())
def test_standard_errors_match_formula(drawn: tuple[list[int], np.ndarray]) -> None:
    """``r_i = h_i - t_i sum h / sum t`` and ``sqrt(sum_i r_i^2 / (k (k - 1)))``, one number after the other."""
    steps, scores = drawn
    found = scores_at(steps, scores)
    k = len(steps)
    errors, mean = found.standard_errors(), found.mean()
    assert errors is not None
    assert mean is not None
    for j in range(scores.shape[1]):
        slope = sum(scores[:, j]) / sum(steps)
        left = [h - t * slope for t, h in zip(steps, scores[:, j], strict=True)]
        expected = math.sqrt(sum(r * r for r in left) / (k * (k - 1)))
        assert errors[j] == pytest.approx(expected, rel=1e-9, abs=1e-6)
        assert mean[j] == pytest.approx(sum(scores[:, j]) / k, rel=1e-9, abs=1e-6)


@given(
    st.lists(st.integers(1, 500), min_size=2, max_size=9, unique=True),
    st.lists(values, min_size=1, max_size=5),
)
def test_scores_proportional_to_steps_have_no_noise(steps: list[int], rates: list[float]) -> None:
    scores = np.outer(steps, rates)
    errors = scores_at(steps, scores).standard_errors()
    assert errors is not None
    assert (errors <= 1e-12 * np.abs(scores).max(axis=0)).all()


def test_standard_errors_match_simulated_mean() -> None:
    """Of many rounds with independent noise at each point: their mean square is the variance of the mean."""
    random = np.random.default_rng(0)
    steps = np.array([60, 70, 80, 90])
    means, squares = [], []
    for _ in range(4000):
        found = scores_at(steps.tolist(), np.outer(steps, [1.0, -2.0]) + random.normal(size=(4, 2)))
        mean, errors = found.mean(), found.standard_errors()
        assert mean is not None
        assert errors is not None
        means.append(mean)
        squares.append(errors**2)
    np.testing.assert_allclose(np.mean(squares, axis=0), np.var(means, axis=0), rtol=0.1)


def test_single_point_uses_noise_of_its_parts() -> None:
    found = RoundScores()
    assert found.mean() is None
    assert found.standard_errors() is None
    shares, parts = [0.5, 0.25, 0.25], np.array([[1.0, 4.0], [2.0, 4.0], [5.0, 4.0]])
    for share, part in zip(shares, parts, strict=True):
        found.add_part(share, part)
    assert found.standard_errors() is None  # the point itself had to be left out
    found.add(10, np.array(shares) @ parts)
    errors = found.standard_errors()
    assert errors is not None
    mean = np.array(shares) @ parts
    literal = np.sqrt(3 / 2 * sum(s**2 * (p - mean) ** 2 for s, p in zip(shares, parts, strict=True)))
    np.testing.assert_allclose(errors, literal)
    assert errors[1] == 0


def test_overflowing_points_have_no_standard_error() -> None:
    found = scores_at([1, 2], np.array([[1e308], [-1e308]]))
    assert found.standard_errors() is None
    assert found.mean() == pytest.approx([0.0])


@given(kept())
def test_points_round_trip_as_plain_values(drawn: tuple[list[int], np.ndarray]) -> None:
    found, other = scores_at(*drawn), RoundScores()
    other.load_state(found.state())
    np.testing.assert_array_equal(other.mean(), found.mean())
    np.testing.assert_array_equal(other.standard_errors(), found.standard_errors())
