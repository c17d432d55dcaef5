"""DoGE by its published rule (Fan et al. 2023): gradients clipped, over their mean norm; `log w += W / mu`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext, Outcome
from mixwell.signals.alignment import Alignment
from mixwell.simplex.updates import MirrorDescent, UniformSmoothing

LR = 0.1


def clip(gradient):
    # torch.nn.utils.clip_grad_norm_, which DoGE's code uses.
    return gradient * min(1.0, 5.0 / (np.linalg.norm(gradient) + 1e-6))


def published(script: Any, *, mu: float, eps: float = 0.0, horizon: int = 1, often=None, universal=False):
    """The rule; weights held for `horizon` steps move by what the steps would have added up to."""
    steps, m, size = script.gradients.shape
    often = np.ones(m) if often is None else np.asarray(often)
    weights = np.full(m, 1 / m)
    path = [weights]
    u, rates = np.zeros((m, size)), 0.0
    for t in range(steps):
        present = [j for j in range(m) if not np.isnan(script.losses[t, j])]
        clipped = {j: clip(script.gradients[t, j]) for j in present}
        mean = np.mean([np.linalg.norm(g) for g in clipped.values()])
        for j, g in clipped.items():
            u[j] += LR * g / (mean + 1e-6) / often[j]
        rates += LR
        if (t + 1) % horizon and t + 1 < steps:
            continue
        target = sum(g / often[j] for j, g in clipped.items()) if universal else clip(script.validation[t])
        scores = np.clip(u @ target, 0, 5 * rates)
        logs = np.log(weights) + scores / mu
        weights = np.exp(logs - logs.max())
        weights = weights / weights.sum()
        weights = (1 - eps) * weights + eps / m
        path.append(weights)
        u, rates = np.zeros((m, size)), 0.0
    return np.array(path)


def doge(mu: float, eps: float = 0.0) -> UniformSmoothing:
    return UniformSmoothing(MirrorDescent(1 / mu), eps)


def long_script(seed: int, *, steps: int = 10) -> Any:
    """Some gradients are longer than 5, some point away from the target."""
    script: Any = Script.random(seed, steps=steps)
    script.gradients *= np.array([1.0, 4.0, 0.3])[:, None]
    script.validation *= 2.5
    return script


def task(
    steps: int = 50, batch_rows: int = 16, mixer: Mapping[str, Any] | None = None, **options
) -> MethodContext:
    method: Any = methods.find("doge")
    return MethodContext(
        domains=("web", "code"),
        rows={"web": 1000, "code": 1000},
        batch_rows=batch_rows,
        steps=steps,
        options=method.options.model_validate(options),
        **mixer or {},
    )


# ------------------------------------------------------------------------------------------------- the rule


def test_one_step_matches_hand_computation() -> None:
    # Norms 3 and 1, mean 2; inner products 3 and 1: W = .1 (3, 1) / 2. With mu = .1 the log-odds are 1.5 - .5 = 1.
    script = Script(np.ones((1, 2)), np.array([[[3.0, 0.0], [0.0, 1.0]]]), np.array([[1.0, 1.0]]))
    played = play(script, Alignment(), doge(0.1), lr=LR)
    np.testing.assert_allclose(played.weights[1], [0.7310586, 0.2689414], rtol=1e-6)
    np.testing.assert_allclose(list(played.mixer.rounds[0].scores.values()), [-0.15, -0.05], rtol=1e-6)


def test_alignment_is_clipped_below_and_above() -> None:
    # Norms 5, 1, 1 with mean 7/3. Products with (5, 0) are 25, -5 and 5: W = .1 x (10.7, -2.1, 2.14) of which the
    # first is cut to 5 lr and the second to 0.
    gradients = np.array([[[50.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]])
    script = Script(np.ones((1, 3)), gradients, np.array([[70.0, 0.0]]))
    played = play(script, Alignment(), doge(1.0), lr=LR)
    scores = list(played.mixer.rounds[0].scores.values())
    np.testing.assert_allclose(scores, [-0.5, 0.0, -0.2142857], rtol=1e-5)


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_golden_trajectory(horizon: int, eps: float) -> None:
    script = long_script(1)
    played = play(script, Alignment(), doge(0.2, eps), horizon=horizon, lr=LR)
    expected = published(script, mu=0.2, eps=eps, horizon=horizon)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-9)
    assert np.ptp(expected, axis=0).min() > 0.05  # all of them move


@pytest.mark.parametrize("horizon", [1, 5])
def test_universal_target_needs_no_validation_set(horizon: int) -> None:
    script = long_script(2)
    script.validation = None
    signal = Alignment(universal=True)
    assert not signal.requirements.validation
    played = play(script, signal, doge(0.2), horizon=horizon, lr=LR)
    expected = published(script, mu=0.2, horizon=horizon, universal=True)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-9)


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("horizon", [1, 4])
def test_absent_domains_add_nothing(horizon: int, universal: bool) -> None:
    script = long_script(3)
    script.losses[[0, 2, 3, 5], 1] = np.nan
    script.losses[[1, 2], 0] = np.nan
    signal = Alignment(universal=universal)
    often = [0.25, 0.5, 1.0]
    probabilities = {"d0": 0.25, "d1": 0.5}
    played = play(script, signal, doge(0.2), horizon=horizon, lr=LR, probabilities=probabilities)
    expected = published(script, mu=0.2, horizon=horizon, often=often, universal=universal)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-9)


@pytest.mark.parametrize("horizon", [1, 4])
def test_micro_batches_are_summed_before_clipping(horizon: int) -> None:
    script = long_script(4)
    random = np.random.default_rng(0)
    noise = 3 * random.normal(size=(10, 3, 4))
    halves = np.stack([script.gradients + noise, script.gradients - noise], axis=2)
    parts = Script(script.losses, validation=script.validation, parts=halves)
    played = play(parts, Alignment(), doge(0.2), horizon=horizon, lr=LR)
    np.testing.assert_allclose(played.weights, published(script, mu=0.2, horizon=horizon), rtol=1e-9)


def test_step_uses_weights_of_its_round() -> None:
    script = long_script(5)
    played = play(script, Alignment(), doge(0.2), horizon=2, lr=LR)
    weights = published(script, mu=0.2, horizon=2)
    theta = np.zeros(4)
    for t in range(9):
        theta = theta - LR * weights[t // 2] @ script.gradients[t]
        np.testing.assert_allclose(played.parameters[t + 1], theta, rtol=1e-9)


# ------------------------------------------------------------------------------------------------- a run


def build(horizon: int, signal: Alignment, **settings):
    model = Point(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    mixer = mixwell.Mixer(
        model, optimizer, names(3), horizon=horizon, budget=9, signal=signal, update=doge(0.2), **settings
    )
    return model, optimizer, mixer


def drive(model: Point, optimizer, mixer: mixwell.Mixer, script: Any, steps: range) -> None:
    """Steps with a learning rate that changes."""
    for t in steps:
        optimizer.param_groups[0]["lr"] = LR * (1 + t)
        for j, name in enumerate(names(3)):
            with mixer.domain(name):
                (torch.from_numpy(script.gradients[t, j]) @ model.theta).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                (torch.from_numpy(script.validation[t]) @ model.theta).backward()


def test_each_step_uses_its_learning_rate() -> None:
    script = long_script(6)
    model, optimizer, mixer = build(3, Alignment())
    drive(model, optimizer, mixer, script, range(3))
    u = np.zeros((3, 4))
    for t in range(3):
        clipped = [clip(g) for g in script.gradients[t]]
        u += LR * (1 + t) * np.array(clipped) / (np.mean([np.linalg.norm(g) for g in clipped]) + 1e-6)
    expected = -np.clip(u @ clip(script.validation[2]), 0, 5 * LR * (1 + 2 + 3))
    np.testing.assert_allclose(list(mixer.rounds[0].scores.values()), expected, rtol=1e-9)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("universal", [False, True])
def test_resume_in_mid_round_is_bit_for_bit(universal: bool, stop: int) -> None:
    script = long_script(7)
    model, optimizer, whole = build(3, Alignment(universal=universal))
    drive(model, optimizer, whole, script, range(9))

    first = build(3, Alignment(universal=universal))
    drive(*first, script, range(stop))
    second = build(3, Alignment(universal=universal))
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    drive(*second, script, range(stop, 9))

    np.testing.assert_array_equal(second[2].weights.history, whole.weights.history)
    assert torch.equal(second[0].theta, model.theta)


def test_state_of_other_settings_raises() -> None:
    _, _, first = build(3, Alignment())
    _, _, second = build(3, Alignment(2.0))
    with pytest.raises(ValueError, match=r"Alignment\(clip_norm=5.0, universal=False, score_cap=5.0\)"):
        second.load_state_dict(first.state_dict())


def test_memory_is_one_or_two_gradients_per_domain() -> None:
    script = long_script(8)
    for horizon, gradients in ((1, 3), (3, 6)):
        model, optimizer, mixer = build(horizon, Alignment())
        drive(model, optimizer, mixer, script, range(6))
        assert mixer.signal.nbytes == gradients * 4 * 8


def test_overflowing_norm_keeps_weights() -> None:
    script = long_script(9)
    script.gradients[4, 1] = 1e200
    model, optimizer, mixer = build(3, Alignment(), on_nonfinite="skip")
    with pytest.warns(UserWarning, match="overflowed in round 1"):
        drive(model, optimizer, mixer, script, range(9))
    history = mixer.weights.history
    np.testing.assert_array_equal(history[2], history[1])
    assert (history[3] != history[2]).all()


def test_round_of_failed_steps_keeps_weights() -> None:
    script = long_script(10)
    model, optimizer, mixer = build(3, Alignment(), on_nonfinite="skip")
    bad = copy.deepcopy(script)
    bad.gradients[3:6] = np.nan
    with pytest.warns(UserWarning, match="non-finite"):
        drive(model, optimizer, mixer, bad, range(9))
    np.testing.assert_array_equal(mixer.weights.history[2], mixer.weights.history[1])


@pytest.mark.parametrize(
    ("settings", "match"), [({"clip_norm": 0}, "clip_norm"), ({"score_cap": -1}, "score_cap")]
)
def test_invalid_settings_raise(settings, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Alignment(**settings)


def test_signal_cannot_be_shared_by_mixers() -> None:
    signal = Alignment()
    build(3, signal)
    with pytest.raises(ValueError, match="in use by another mixer"):
        build(3, signal)


# ------------------------------------------------------------------------------------------------- the method


def test_recipe_matches_rule() -> None:
    script = long_script(11)
    method: Any = methods.find("doge")
    recipe = method.recipe(task(mu=0.2, smoothing=0.05))
    played = play(script, recipe.signal, recipe.update, horizon=method.horizon(9), lr=LR)
    np.testing.assert_allclose(played.weights, published(script, mu=0.2, eps=0.05), rtol=1e-9)


def test_model_is_trained_with_average_proxy_weights() -> None:
    method: Any = methods.find("doge")
    stages = method.stages(task(mu=0.2, proxy_steps=30, proxy_model={"layers": 2}))
    (proxy,) = next(stages)
    assert (proxy.name, proxy.steps, proxy.model) == ("proxy", 30, {"layers": 2})
    assert proxy.mixer["method"] == "doge"
    # The proxy's own options are those of the run, but it trains no other proxy.
    inner = task(**proxy.mixer["options"])
    assert inner.options.mu == 0.2
    assert not inner.options.transfer
    assert stopped(method.stages(inner)) == {}
    outcome = Outcome(reference="proxy", loss=1.0, average={"web": 0.3, "code": 0.7})
    with pytest.raises(StopIteration) as end:
        stages.send([outcome])
    assert end.value.value == {"method": "fixed", "weights": {"web": 0.3, "code": 0.7}, "options": {}}


def stopped(stages) -> dict:
    with pytest.raises(StopIteration) as end:
        next(stages)
    return end.value.value


def test_cost_of_proxy() -> None:
    extra = methods.find("doge").extra
    assert extra(task(transfer=False)) == Extra()
    # 50 steps with a validation gradient of one batch after each.
    assert extra(task()) == Extra(before=100)
    assert extra(task(target="domains")) == Extra(before=50)
    # 20 steps, a validation gradient of half a batch after every 6th (the last after 8): 3 of them.
    mixer = {"horizon": 6, "validation_rows": 8}
    assert extra(task(proxy_steps=20, mixer=mixer)) == Extra(before=20 + 3 / 2)
    # With a warm-up of 8 there is 1, of one batch: a twentieth of 10 steps is less.
    mixer = {"horizon": 10, "warmup": 8}
    assert extra(task(proxy_steps=20, mixer=mixer)) == Extra(before=20 + 1)
    # Of rounds of 40 steps a twentieth is 2 batches.
    mixer = {"horizon": 40}
    assert extra(task(proxy_steps=80, mixer=mixer)) == Extra(before=80 + 2 * 2)
