"""ODM by the rule of its authors' code (Albalak et al. 2023): rewards, exploration, weights."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mixwell
from helpers.commands import PATIENCE
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext
from mixwell.signals.losses import LossRewards
from mixwell.simplex.updates import SoftmaxWeights


def published(losses, decay: float = 0.9, horizon: int = 1):
    """``losses[t][i]``, NaN where the domain is not in the step. Uniform weights at the beginning."""
    count = len(losses[0])
    rewards = [0.0] * count
    path = [[1 / count] * count]
    for t, step in enumerate(losses, start=1):
        for i in range(count):
            if not math.isnan(step[i]):
                rewards[i] = decay * rewards[i] + (1 - decay) * math.exp(step[i])
        if t % horizon == 0 or t == len(losses):
            e = min(1 / count, math.sqrt(math.log(count) / (count * t)))
            path.append([(1 - count * e) * r / sum(rewards) + e for r in rewards])
    return np.array(path)


def test_one_step_matches_hand_computation() -> None:
    # K = 2: at t = 1 e is 1/2, so the weights are even. At t = 8 it is sqrt(log 2 / 16) = .2081.
    losses = np.tile([math.log(3), 0.0], (8, 1))
    played = play(Script(losses), LossRewards(), SoftmaxWeights())
    np.testing.assert_allclose(played.weights[1], [0.5, 0.5], rtol=1e-12)
    e = math.sqrt(math.log(2) / 16)
    np.testing.assert_allclose(
        played.weights[-1], [(1 - 2 * e) * 0.75 + e, (1 - 2 * e) * 0.25 + e], rtol=1e-12
    )


@pytest.mark.parametrize("horizon", [1, 4, 7])
@pytest.mark.parametrize("decay", [0.9, 0.5, 0.0])
def test_golden_trajectory(horizon: int, decay: float) -> None:
    script = Script.random(2, steps=32)
    script.losses[4, 1] = script.losses[10, 0] = script.losses[11, 0] = np.nan
    played = play(script, LossRewards(decay), SoftmaxWeights(), horizon=horizon)
    np.testing.assert_allclose(played.weights, published(script.losses, decay, horizon), rtol=1e-12)


def test_unseen_domain_has_exploration_weight() -> None:
    losses = np.random.default_rng(0).uniform(1, 2, (20, 3))
    losses[:12, 2] = np.nan
    played = play(Script(losses), LossRewards(), SoftmaxWeights())
    np.testing.assert_allclose(played.weights, published(losses), rtol=1e-12)
    assert played.weights[12, 2] == pytest.approx(math.sqrt(math.log(3) / 36), rel=1e-12)
    assert played.mixer.rounds[11].measured["exploration"] == pytest.approx(math.sqrt(math.log(3) / 36))


def test_overflowing_exponential_of_loss() -> None:
    losses = np.full((40, 2), 5000.0)
    losses[:, 1] -= math.log(3)
    with pytest.raises(OverflowError):
        published(losses)
    played = play(Script(losses), LossRewards(), SoftmaxWeights())
    np.testing.assert_allclose(played.weights, published(losses - 5000), rtol=1e-9)


def test_one_domain_keeps_its_weight() -> None:
    played = play(Script(np.ones((4, 1))), LossRewards(), SoftmaxWeights())
    np.testing.assert_allclose(played.weights, 1.0)


def mixer_of(*, horizon: int = 4, steps: int = 11, warmup: int = 0) -> tuple[Point, mixwell.Mixer]:
    model = Point(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"budget": steps, "horizon": horizon, "warmup": warmup}
    return model, mixwell.Mixer(
        model,
        optimizer,
        names(3),
        signal=LossRewards(),
        update=SoftmaxWeights(),
        weights=[1, 1, 2],
        **settings,
    )


def row_steps(steps: int = 11):
    random = np.random.default_rng(5)
    return [(random.permutation([0, 0, 1, 1, 1, 2]), random.uniform(0.5, 2.0, 6)) for _ in range(steps)]


def feed(model: Point, mixer: mixwell.Mixer, steps, parts=(slice(0, 6),)) -> None:
    for labels, losses in steps:
        for part in parts:
            values = torch.tensor(losses[part]) + 0 * model.theta.sum()
            counts = {"d0": 2, "d1": 3, "d2": 1} if len(parts) > 1 else None
            with mixer.batch(labels[part], expected_counts=counts) as batch:
                batch.weighted_loss(values).backward()
        mixer.step()


def means(steps):
    return np.array([[losses[labels == j].mean() for j in range(3)] for labels, losses in steps])


@pytest.mark.parametrize("parts", [(slice(0, 6),), (slice(0, 1), slice(1, 4), slice(4, 6))])
def test_reward_uses_mean_loss_of_domain(parts) -> None:
    steps = row_steps()
    model, mixer = mixer_of()
    feed(model, mixer, steps, parts)
    np.testing.assert_allclose(mixer.weights.history[1:], published(means(steps), horizon=4)[1:], rtol=1e-12)


def test_warmup_steps_are_not_counted() -> None:
    steps = row_steps()
    model, mixer = mixer_of(horizon=1, warmup=3)
    feed(model, mixer, steps)
    np.testing.assert_allclose(mixer.weights.history[0], [0.25, 0.25, 0.5], rtol=1e-12)
    np.testing.assert_allclose(mixer.weights.history[1:], published(means(steps[3:]))[1:], rtol=1e-12)


@pytest.mark.parametrize("stop", [0, 2, 4, 7, 9])
def test_resume_is_bit_for_bit(stop: int, tmp_path: Path) -> None:
    steps = row_steps()
    model, whole = mixer_of()
    feed(model, whole, steps)
    model, first = mixer_of()
    feed(model, first, steps[:stop])
    first.save(tmp_path / "state")
    kept = copy.deepcopy(model.state_dict())
    model, resumed = mixer_of()
    model.load_state_dict(kept)
    resumed.load(tmp_path / "state")
    feed(model, resumed, steps[stop:])
    np.testing.assert_array_equal(resumed.weights.log, whole.weights.log)
    assert resumed.rounds == whole.rounds
    assert resumed.signal.nbytes == whole.signal.nbytes > 0


WORK = """
import json, sys
import torch
from test_odm import feed, mixer_of, row_steps

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model, mixer = mixer_of()
feed(model, mixer, [(labels, losses + rank) for labels, losses in row_steps()])
print(json.dumps(mixer.weights.history.tolist()))
torch.distributed.destroy_process_group()
"""


def test_two_ranks_have_same_weights(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}\n"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", path + WORK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=PATIENCE) for process in running]
    assert all(process.returncode == 0 for process in running), told
    first, second = (np.array(json.loads(out.splitlines()[-1])) for out, _ in told)
    np.testing.assert_array_equal(first, second)
    # The second process has losses that are greater by one, so that the mean is greater by a half.
    np.testing.assert_allclose(first[1:], published(means(row_steps()) + 0.5, horizon=4)[1:], rtol=1e-12)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_invalid_arguments_raise(decay: float) -> None:
    with pytest.raises(ValueError, match=r"the decay of the rewards must be in \[0, 1\), got"):
        LossRewards(decay)


def test_method_matches_rule() -> None:
    method = methods.find("odm")
    assert method.horizon is not None
    assert method.horizon(1000) == 1
    assert not method.needs.validation
    options = method.options.model_validate({"decay": 0.5})
    task = MethodContext(
        domains=("a", "b", "c"), rows={"a": 1, "b": 1, "c": 1}, batch_rows=8, steps=10, options=options
    )
    recipe = method.recipe(task)
    script = Script.random(3, steps=9)
    played = play(script, recipe.signal, recipe.update)
    np.testing.assert_allclose(played.weights, published(script.losses, 0.5), rtol=1e-12)
    assert method.extra(task) == Extra()
    assert repr(recipe.signal) == "LossRewards(decay=0.5)"
