"""Weights and constraints that are set while a model trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from mixwell import ConstantWeights, Floor, Hypergradient, Mixer, MixtureLoader
from mixwell.simplex.constraints import Cap

RATE = 0.05


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(net: nn.Module, name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + "abv".index(name))
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return (net(x).squeeze(1) - (-x[:, 0] if name == "b" else x.sum(1))).square().mean()


def mixer_of(net: nn.Module, **settings: Any) -> Mixer:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    return Mixer(net, optimizer, ["a", "b"], **{"horizon": 4, "update": 1.0, **settings})


def train(mixer: Mixer, net: nn.Module, steps: range) -> None:
    for step in steps:
        for name in "ab":
            with mixer.domain(name):
                loss(net, name, step).backward()
        mixer.step()
        while mixer.validation_due:
            with mixer.validation():
                loss(net, "v", step).backward()


def parameters(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


@pytest.mark.parametrize("at", [0, 4, 6], ids=["before training", "between rounds", "in a round"])
def test_weights_count_from_the_next_step_on(at: int) -> None:
    net, plain = model(), model()
    mixer = mixer_of(net, signal=ConstantWeights())
    kept = mixer.weights
    train(mixer, net, range(at))
    mixer.weights = {"b": 9, "a": 1}
    assert kept.last == pytest.approx({"a": 0.1, "b": 0.9})
    train(mixer, net, range(at, 10))
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in range(10):
        w = 0.5 if step < at else 0.1
        optimizer.zero_grad()
        (w * loss(plain, "a", step) + (1 - w) * loss(plain, "b", step)).backward()
        optimizer.step()
    torch.testing.assert_close(parameters(net), parameters(plain))
    # Rounds of 4 steps from there on; the last one is not finished.
    rounds = np.array([record.steps for record in mixer.rounds])
    assert rounds.tolist() == {0: [4, 4], 4: [4, 4], 6: [4, 2, 4]}[at]
    done = int(rounds.sum())
    assert mixer.weights.average["a"] == pytest.approx((0.5 * at + 0.1 * (done - at)) / done)
    assert len(mixer.weights.history) == len(rounds) + 1


def test_a_round_after_weights_were_set_is_that_of_a_new_mixer() -> None:
    net, other = model(), model()
    mixer = mixer_of(net, signal=Hypergradient())
    train(mixer, net, range(6))
    other.load_state_dict(net.state_dict())
    mixer.weights = [0.2, 0.8]
    new = mixer_of(other, signal=Hypergradient(), weights=[0.2, 0.8])
    train(mixer, net, range(6, 12))
    train(new, other, range(6, 12))
    assert [record.steps for record in mixer.rounds] == [4, 2, 4]
    cut, whole = mixer.rounds[1:]
    assert (cut.scores, cut.step_size, cut.points) == ({}, 0.0, 0)
    assert (cut.first_step, whole.first_step) == (4, 6)
    assert whole.scores == pytest.approx(new.rounds[0].scores)
    assert mixer.weights.last == pytest.approx(new.weights.last)
    torch.testing.assert_close(parameters(net), parameters(other))


def test_weights_that_are_set_respect_the_constraints() -> None:
    mixer = mixer_of(model(), constraints=[Floor(0.2)])
    mixer.weights = {"a": 1, "b": 99}
    assert mixer.weights.last == pytest.approx({"a": 0.2, "b": 0.8})
    mixer.weights = mixer_of(model(), weights=[3, 1]).weights
    assert mixer.weights.last == pytest.approx({"a": 0.75, "b": 0.25})


@pytest.mark.parametrize(
    ("given", "named"), [({"a": 1, "c": 1}, "unknown: \\['c'\\]"), ([1, 0], "positive"), (None, "None")]
)
def test_wrong_weights_change_nothing(given: Any, named: str) -> None:
    mixer = mixer_of(model(), weights=[3, 1])
    with pytest.raises(ValueError, match=named):
        mixer.weights = given
    assert mixer.weights.last == {"a": 0.75, "b": 0.25}


def test_weights_are_not_set_in_a_step() -> None:
    net = model()
    mixer = mixer_of(net)
    with mixer.domain("a"):
        loss(net, "a", 0).backward()
    with pytest.raises(RuntimeError, match=r"mixer.weights = \.\.\. is possible between steps"):
        mixer.weights = [1, 2]


def test_a_state_after_weights_were_set_resumes_as_without_a_stop() -> None:
    net, other = model(), model()
    mixer = mixer_of(net)
    train(mixer, net, range(6))
    mixer.weights = [0.2, 0.8]
    saved, resumed = mixer.state_dict(), mixer_of(other)
    other.load_state_dict(net.state_dict())
    resumed.load_state_dict(saved)
    train(mixer, net, range(6, 12))
    train(resumed, other, range(6, 12))
    assert resumed.rounds == mixer.rounds
    assert torch.equal(parameters(net), parameters(other))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_follows_weights_that_are_set(num_workers: int) -> None:
    net = model()
    mixer = mixer_of(net, signal=ConstantWeights(), horizon=6, budget=12)
    rows = {name: torch.zeros(50, 3, dtype=torch.float64) for name in "ab"}
    loader = MixtureLoader(rows, 20, least=0, num_workers=num_workers)
    seen: list[int] = []
    for batch in loader.follow(mixer):
        with mixer.batch(batch) as scope:
            scope.weighted_loss(
                net(batch.rows[0] if isinstance(batch.rows, tuple) else batch.rows)
            ).backward()
        mixer.step()
        seen.append(batch.counts["a"])
        if mixer.steps_done == 2:
            mixer.weights = [0.9, 0.1]
    loader.shutdown_workers()
    # Workers have read the rest of the round ahead; its rows count by the weights that were set.
    ahead = 6 if num_workers else 2
    assert seen == [10] * ahead + [18] * (12 - ahead)


def test_constraints_count_from_the_next_update_on() -> None:
    net = model()
    mixer = mixer_of(net, update=100.0, constraints=[Cap(0.9)])
    train(mixer, net, range(4))
    assert min(mixer.weights.last.values()) == pytest.approx(0.1)
    before = mixer.weights.last
    mixer.constraints = [*mixer.constraints, Floor(0.3)]
    assert mixer.weights.last == before
    assert mixer.limits["a"] == (0.3, 0.9)
    train(mixer, net, range(4, 8))
    assert min(mixer.weights.last.values()) == pytest.approx(0.3)
    mixer.constraints = []
    train(mixer, net, range(8, 16))
    assert min(mixer.weights.last.values()) < 0.1


@pytest.mark.parametrize("given", [[Floor(0.6)], [Floor({"c": 0.1})], [0.3], Floor(0.1)])
def test_wrong_constraints_change_nothing(given: Any) -> None:
    mixer = mixer_of(model(), constraints=[Cap(0.9)])
    kept = mixer.constraints
    with pytest.raises((ValueError, TypeError)):
        mixer.constraints = given
    assert mixer.constraints == kept


@pytest.mark.parametrize(
    "name", ["signal", "update", "clip_norm", "on_nonfinite", "rounds", "horizon", "weight"]
)
def test_other_settings_cannot_be_set(name: str) -> None:
    mixer = mixer_of(model())
    with pytest.raises(AttributeError, match=name):
        setattr(mixer, name, mixwell.ConstantWeights())
