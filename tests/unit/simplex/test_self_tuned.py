"""How far the default update moves the weights along scripted scores: signal, noise, and both."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mixwell.simplex.updates import FACTOR, LEAST_GAIN, MirrorDescent, RoundContext, trust

M, ROUNDS = 5, 12
UNIT = FACTOR * math.sqrt(math.log(M) / ROUNDS)
"""How far a gain of 1 moves the log-weight of the largest score in a round."""


def path(scores: np.ndarray, noise: np.ndarray | None, **settings) -> np.ndarray:
    """Log-weights after every round, less their mean, shape ``(rounds + 1, m)``."""
    update, log = MirrorDescent("auto", **settings), np.zeros(M)
    found = [log]
    for k, row in enumerate(scores):
        known = None if noise is None else noise[k]
        log, _ = update.step(log, row, RoundContext(k, len(scores), noise=known))
        found.append(log - log.mean())
    return np.array(found)


def constant() -> np.ndarray:
    row = np.array([1.0, -1.0, 0.5, -0.5, 0.0])
    return np.tile(row, (ROUNDS, 1))


def test_constant_noiseless_signal_takes_full_steps() -> None:
    found = path(constant(), np.zeros((ROUNDS, M)))
    expected = -UNIT * constant()
    np.testing.assert_allclose(np.diff(found, axis=0), expected, rtol=1e-12, atol=1e-12)
    # Without standard errors the scores are taken at their word.
    np.testing.assert_allclose(path(constant(), None), found)


def test_first_round_moves_less_than_tenth_of_path() -> None:
    moves = np.abs(np.diff(path(constant(), None), axis=0)).max(axis=1)
    assert moves[0] < 0.1 * moves.sum()


@pytest.mark.parametrize("seed", range(6))
def test_noise_moves_weights_like_short_random_walk(seed: int) -> None:
    """Standard errors are those that the scores have; a constant signal of the same size is the measure."""
    noise = np.ones((ROUNDS, M))
    scores = np.random.default_rng(seed).normal(size=(ROUNDS, M))
    walked, taken_for_signal = path(scores, noise), path(scores, noise, shrink=False)
    straight = np.abs(path(constant(), np.zeros((ROUNDS, M)))[-1]).max()
    assert np.abs(walked[-1]).max() < straight / math.sqrt(ROUNDS)
    lengths = [np.abs(np.diff(one, axis=0)).max(axis=1).sum() for one in (walked, taken_for_signal)]
    assert lengths[0] < lengths[1]


def test_noisy_signal_is_followed() -> None:
    random = np.random.default_rng(0)
    noise = np.full((ROUNDS, M), 0.2)
    found = path(constant() + random.normal(size=(ROUNDS, M)) * noise, noise)[-1]
    assert np.argmax(found) == 1
    assert np.argmin(found) == 0
    assert found[1] > 0.5 * path(constant(), None)[-1][1]


def test_contradicting_rounds_shorten_steps() -> None:
    signs = (-1.0) ** np.arange(ROUNDS)
    moves = np.abs(np.diff(path(constant() * signs[:, None], None), axis=0)).max(axis=1)
    np.testing.assert_allclose(moves, UNIT * np.maximum(0.5 ** np.arange(ROUNDS), LEAST_GAIN))


def test_short_last_round_moves_less() -> None:
    """It has a quarter of the steps, so a quarter of the scores."""
    for fraction in (1.0, 0.25):
        update, before, log = MirrorDescent("auto"), np.zeros(M), np.zeros(M)
        for k, row in enumerate(constant()):
            last = fraction if k == ROUNDS - 1 else 1.0
            before = log
            log, _ = update.step(log, last * row, RoundContext(k, ROUNDS, fraction=last))
        step = log - before
        moved = np.abs(step - step.mean()).max()
        assert moved == pytest.approx(fraction * UNIT)


def test_resumed_update_is_unchanged() -> None:
    random = np.random.default_rng(3)
    scores, noise = random.normal(size=(ROUNDS, M)), np.full(M, 0.3)
    update, resumed = MirrorDescent("auto"), MirrorDescent("auto")
    for k in range(5):
        update.next_step_size(scores[k], RoundContext(k, ROUNDS, noise=noise))
    resumed.load_state(update.state())
    assert resumed.summary() == update.summary()
    for k in range(5, ROUNDS):
        one, other = (
            each.next_step_size(scores[k], RoundContext(k, ROUNDS, noise=noise)) for each in (update, resumed)
        )
        assert one == other


def test_trust_is_positive_part_james_stein_factor() -> None:
    scores, noise = np.array([3.0, -1.0, -2.0]), np.array([0.5, 1.0, 0.2])
    length = (scores**2).sum()  # their mean is zero
    assert trust(scores, noise) == pytest.approx(1 - (2 / 3) * (0.25 + 1 + 0.04) / length)
    assert trust(scores + 7, noise) == pytest.approx(trust(scores, noise))
    assert trust(1e200 * scores, 1e200 * noise) == pytest.approx(trust(scores, noise))
    assert trust(scores, 100 * noise) == 0
    assert trust(scores, np.full(3, 1e300)) == 0
    assert trust(np.zeros(3), noise) == 0
    assert trust(scores, None) == 1


def test_equal_scores_have_zero_trust() -> None:
    update = MirrorDescent("auto")
    update.next_step_size(constant()[0], RoundContext(0, ROUNDS, noise=np.zeros(M)))
    assert update.summary()["trust"] == 1
    assert update.next_step_size(np.ones(M), RoundContext(1, ROUNDS, noise=np.zeros(M))) == 0
    assert update.summary()["trust"] == 0


@pytest.mark.parametrize("domains", [2, 3, 9, 11])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_scores_at_the_largest_float_move_nothing(domains: int, sign: float) -> None:
    log = np.full(domains, -math.log(domains))
    scores = np.full(domains, sign * np.finfo(np.float64).max)
    moved, alpha = MirrorDescent("auto").step(log, scores, RoundContext(0, 10))
    assert alpha == 0
    np.testing.assert_array_equal(moved, log)


@pytest.mark.parametrize("size", [400.0, 1e22, 1e300])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_one_huge_round_neither_freezes_nor_moves_weights_far(at: int, size: float) -> None:
    scores = constant()
    undisturbed = path(scores, None)
    scores[at] *= size
    found = path(scores, None)
    # No round moves farther than the others do.
    moves = np.abs(np.diff(found, axis=0)).max(axis=1)
    assert moves.max() <= UNIT * (1 + 1e-12)
    # Steps of 1/8, 1/4 and 1/2 follow where nothing was known before, and full ones after them.
    np.testing.assert_allclose(moves[at + 4 :], UNIT, rtol=1e-12)
    assert np.abs(found[-1]).max() >= np.abs(undisturbed[-1]).max() - (0.875 + 0.75 + 0.5) * UNIT - 1e-9


def test_size_decays_by_half_where_no_round_is_an_outlier() -> None:
    falling = constant() * np.array([8.0, 1.0, 1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None]
    moves = np.abs(np.diff(path(falling, None), axis=0)).max(axis=1) / UNIT
    np.testing.assert_allclose(moves[:6], [1.0, 1 / 4, 1 / 2, 1.0, 0.01 / 0.5, 1.0], rtol=1e-12)
