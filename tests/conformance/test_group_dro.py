"""Group DRO by its published rule, q_g ~ q_g exp(eta (l_g + C / sqrt n_g)) (Sagawa et al. 2020, Algorithm 1)."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext
from mixwell.signals.losses import DomainLosses
from mixwell.simplex.updates import MirrorDescent

ROWS = {"d0": 100, "d1": 25, "d2": 400}


def published(losses, eta: float, added, weights, horizon: int = 1):
    """Step by step; weights that are held over a round move by what its steps add up to."""
    weights = np.array(weights, dtype=np.float64)
    path, exponent = [weights], np.zeros(len(weights))
    for t, loss in enumerate(losses, start=1):
        for g in range(len(weights)):
            exponent[g] += eta * ((0.0 if np.isnan(loss[g]) else loss[g]) + added[g])
        if t % horizon == 0 or t == len(losses):
            weights = weights * np.exp(exponent)
            weights = weights / weights.sum()
            path.append(weights)
            exponent = np.zeros(len(weights))
    return np.array(path)


def test_two_steps_match_hand_computation() -> None:
    # eta = log 2: weights double for every unit of loss. (1, 1) x (2^1, 2^0) = (2, 1); x (2^0, 2^2) = (2, 4).
    script = Script(np.array([[1.0, 0.0], [0.0, 2.0]]))
    played = play(script, DomainLosses(), MirrorDescent(float(np.log(2))))
    np.testing.assert_allclose(played.weights, [[1 / 2, 1 / 2], [2 / 3, 1 / 3], [1 / 3, 2 / 3]], rtol=1e-14)


def test_size_adjustment_matches_hand_computation() -> None:
    # C / sqrt(n) = 1 for 4 rows and .5 for 16: exponents of log 4 (1 + 1, 1 + .5) give 16 : 8.
    script = Script(np.array([[1.0, 1.0]]))
    signal = DomainLosses(2.0, {"d0": 4, "d1": 16})
    played = play(script, signal, MirrorDescent(float(np.log(4))))
    np.testing.assert_allclose(played.weights[-1], [2 / 3, 1 / 3], rtol=1e-14)


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("adjustment", [0.0, 3.0])
def test_golden_trajectory(horizon: int, adjustment: float) -> None:
    script = Script.random(3, steps=10)
    script.losses[2, 1] = script.losses[5, 0] = script.losses[6, 0] = np.nan
    start = [0.2, 0.5, 0.3]
    signal = DomainLosses(adjustment, ROWS)
    played = play(script, signal, MirrorDescent(0.3), horizon=horizon, weights=start)
    added = adjustment / np.sqrt([100, 25, 400])
    expected = published(script.losses, 0.3, added, start, horizon)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-12)


def test_round_weights_apply_to_its_gradients() -> None:
    script = Script.random(4, steps=3)
    played = play(script, DomainLosses(), MirrorDescent(0.5), lr=0.1)
    weights = published(script.losses, 0.5, np.zeros(3), np.full(3, 1 / 3))
    assert script.gradients is not None
    theta = np.zeros(4)
    for t in range(3):
        theta = theta - 0.1 * weights[t] @ script.gradients[t]
        np.testing.assert_allclose(played.parameters[t + 1], theta, rtol=1e-12)


def test_absent_domain_can_keep_last_loss() -> None:
    losses = np.array([[1.0, 2.0], [1.0, np.nan], [1.0, np.nan], [1.0, 0.5]])
    played = play(Script(losses), DomainLosses(absent="last"), MirrorDescent(1.0))
    filled = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 0.5]])
    np.testing.assert_allclose(played.weights, published(filled, 1.0, [0, 0], [0.5, 0.5]), rtol=1e-12)


def row_mixer(signal=None, *, horizon: int = 2, steps: int = 6) -> tuple[Point, mixwell.Mixer]:
    model = Point(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = DomainLosses(3.0, ROWS) if signal is None else signal
    mixer = mixwell.Mixer(
        model, optimizer, names(3), budget=steps, horizon=horizon, signal=signal, update=MirrorDescent(0.3)
    )
    return model, mixer


def rows_of_steps(steps: int):
    random = np.random.default_rng(5)
    for _ in range(steps):
        labels = random.permutation([0, 0, 1, 1, 1, 2])
        yield labels, random.uniform(0.5, 2.0, 6)


def feed(model: Point, mixer: mixwell.Mixer, steps, *, way: str) -> None:
    for labels, losses in steps:
        values = torch.tensor(losses) + 0 * model.theta.sum()
        if way == "whole":
            with mixer.batch(labels) as batch:
                batch.weighted_loss(values).backward()
        elif way == "mixed parts":
            counts = {"d0": 2, "d1": 3, "d2": 1}
            for part in (slice(0, 2), slice(2, 6)):
                with mixer.batch(labels[part], expected_counts=counts) as batch:
                    batch.weighted_loss(values[part]).backward(retain_graph=True)
        else:
            for j, name in enumerate(names(3)):
                own = np.flatnonzero(labels == j)
                for row in own:
                    with mixer.domain(name, fraction=1 / len(own)) as scope:
                        values[row].backward(retain_graph=True)
                        scope.record_loss(values[row])
        mixer.step()


@pytest.mark.parametrize("way", ["whole", "mixed parts", "shares of domains"])
def test_loss_is_mean_over_any_micro_batches(way: str) -> None:
    model, mixer = row_mixer()
    feed(model, mixer, rows_of_steps(6), way=way)
    means = np.array([[losses[labels == j].mean() for j in range(3)] for labels, losses in rows_of_steps(6)])
    expected = published(means, 0.3, 3 / np.sqrt([100, 25, 400]), np.full(3, 1 / 3), horizon=2)
    np.testing.assert_allclose(mixer.weights.history, expected, rtol=1e-12)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_resume_is_bit_for_bit(stop: int, tmp_path) -> None:
    steps = list(rows_of_steps(6))
    model, whole = row_mixer(DomainLosses(3.0, ROWS, absent="last"), horizon=4)
    feed(model, whole, steps, way="whole")
    model, first = row_mixer(DomainLosses(3.0, ROWS, absent="last"), horizon=4)
    feed(model, first, steps[:stop], way="whole")
    first.save(tmp_path / "state")
    kept = copy.deepcopy(model.state_dict())
    model, resumed = row_mixer(DomainLosses(3.0, ROWS, absent="last"), horizon=4)
    model.load_state_dict(kept)
    resumed.load(tmp_path / "state")
    feed(model, resumed, steps[stop:], way="whole")
    np.testing.assert_array_equal(resumed.weights.log, whole.weights.log)
    assert resumed.rounds == whole.rounds
    assert resumed.nbytes > 0


def test_state_of_other_settings_raises() -> None:
    _, mixer = row_mixer()
    _, other = row_mixer(DomainLosses(2.0, ROWS))
    with pytest.raises(ValueError, match="signal"):
        other.load_state_dict(mixer.state_dict())


def test_skipped_step_adds_no_loss() -> None:
    model = Point(2)
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        ["a", "b"],
        budget=2,
        horizon=2,
        signal=DomainLosses(),
        update=MirrorDescent(1.0),
        clip_norm=1.0,
        on_nonfinite="skip",
    )
    # The norm of the first step's gradient overflows when all of its losses are told already.
    for steep, losses in ((1e200, [5.0, 3.0]), (0.0, [1.0, 0.0])):
        with mixer.batch([0, 1]) as batch:
            batch.weighted_loss(torch.tensor(losses) + steep * model.theta.sum()).backward()
        if steep:
            with pytest.warns(UserWarning, match="overflowed"):
                mixer.step()
        else:
            mixer.step()
    np.testing.assert_allclose(mixer.weights.values, np.exp([1, 0]) / np.exp([1, 0]).sum(), rtol=1e-12)


def test_unrecorded_losses_raise() -> None:
    model, mixer = row_mixer()
    with pytest.raises(ValueError, match=r"requires the losses: call scope\.record_loss"):
        with mixer.domain("d0"):
            model.theta.sum().backward()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DomainLosses(-1.0), "must be finite and not negative, got -1"),
        (lambda: DomainLosses(1.0), r"C = 1.0 needs the number of rows of every domain: rows=\{\.\.\.\}"),
        (lambda: DomainLosses(1.0, {"d0": 0}), r"must be positive, got \{'d0': 0\}"),
        (lambda: DomainLosses(absent="never"), "'last' or 'zero', got 'never'"),
        (lambda: row_mixer(DomainLosses(1.0, {"d0": 3, "d1": 4})), "needs the rows of d2"),
    ],
)
def test_invalid_arguments_raise(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_signal_cannot_be_shared_by_mixers() -> None:
    signal = DomainLosses()
    row_mixer(signal)
    with pytest.raises(ValueError, match="this DomainLosses is in use by another mixer"):
        row_mixer(signal)


def test_method_matches_rule() -> None:
    method = methods.find("group-dro")
    assert method.horizon is not None
    assert method.horizon(1000) == 1
    assert not method.needs.validation
    options = method.options.model_validate({"eta": 0.3, "size_adjustment": 3.0})
    task = MethodContext(domains=tuple(ROWS), rows=ROWS, batch_rows=8, steps=10, options=options)
    recipe = method.recipe(task)
    script = Script.random(3, steps=5)
    played = play(script, recipe.signal, recipe.update)
    expected = published(script.losses, 0.3, 3 / np.sqrt([100, 25, 400]), np.full(3, 1 / 3))
    np.testing.assert_allclose(played.weights, expected, rtol=1e-12)
    assert method.extra(task) == Extra()
    plain = method.recipe(replace(task, options=method.options()))
    assert repr(plain.signal) == "DomainLosses(size_adjustment=0.0, rows=None, absent='zero')"
    assert repr(plain.update) == "MirrorDescent(0.01)"
