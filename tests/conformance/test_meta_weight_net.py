"""Meta-Weight-Net (Shu et al. 2019): the published algorithm, by autograd through its step, beside a real run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mixwell
from helpers.row_weighting import (
    LR,
    NAMES,
    Batch,
    Run,
    copies,
    joined,
    losses_at,
    mean_loss,
    network,
    row_losses,
)
from mixwell import methods
from mixwell.methods import MethodContext
from mixwell.signals.probes import Probes
from mixwell.signals.row_network import LossNetwork
from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

PARTS = ("in.weight", "in.bias", "out.weight", "out.bias")


class Literal:
    """The published algorithm: a network V of the losses, a virtual step through it, Adam on its meta gradient."""

    def __init__(self, run: Run, *, normalize: bool, weights: list[float] | None = None) -> None:
        state = run.signal.state()[1]
        self.run, self.normalize = run, normalize
        self.theta = copies(run.model)
        self.net = [state[f"network.{part}"].detach().clone().requires_grad_() for part in PARTS]
        self.adam = torch.optim.Adam(self.net, 1e-3, weight_decay=1e-4)
        self.domains = np.full(3, 1 / 3) if weights is None else np.array(weights) / np.sum(weights)

    def v(self, losses: Tensor) -> Tensor:
        w1, b1, w2, b2 = self.net
        return torch.sigmoid(torch.relu(losses.detach()[:, None] @ w1.T + b1) @ w2.T + b2).squeeze(1)

    def objective(self, batch: Batch, rows: list[int], *, learning: bool) -> Tensor:
        """What a step makes less: the weighted mean, or sum of normalized weights, of the losses."""
        losses = losses_at(self.theta, batch)
        v = self.v(losses) if learning else self.v(losses).detach()
        measure = torch.from_numpy(np.repeat(self.domains / np.array(rows), rows))
        if self.normalize:
            v = v / (measure * v).sum()
        return (measure * v * losses).sum()

    def meta_step(self, k: int) -> None:
        run = self.run
        batch = joined([run.asides[name].at(k) for name in NAMES])
        training = self.objective(batch, [run.probe_rows] * 3, learning=True)
        gradients = torch.autograd.grad(training, self.theta, create_graph=True)
        virtual = [p - LR * g for p, g in zip(self.theta, gradients, strict=True)]
        meta = losses_at(virtual, run.aside.at(k)).mean()
        self.adam.zero_grad()
        meta.backward(inputs=self.net)
        self.adam.step()

    def step(self, loss: Tensor) -> float:
        gradients = torch.autograd.grad(loss, self.theta)
        self.theta = [
            (p - LR * g).detach().requires_grad_() for p, g in zip(self.theta, gradients, strict=True)
        ]
        return loss.item()

    def expect_equal(self) -> None:
        flat = torch.cat([p.detach().flatten() for p in self.theta]).numpy()
        np.testing.assert_allclose(self.run.vector, flat, atol=1e-9)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_row_weights_match_published_network(normalize: bool, horizon: int) -> None:
    run = Run(LossNetwork(normalize=normalize, seed=7), horizon=horizon)
    literal = Literal(run, normalize=normalize)
    first = [part.detach().clone() for part in literal.net]
    for k in range(9):
        if k % horizon == 0:
            literal.meta_step(k // horizon)
        batch, _ = run.batch(k)
        loss = literal.step(literal.objective(batch, [4, 4, 4], learning=False))
        run.step()
        assert run.seen[-1] == pytest.approx(loss, abs=1e-9)
        literal.expect_equal()
    literal.meta_step(9 // horizon)  # when a round has ended, the network has learned for the next
    state = run.signal.state()[1]
    for part, own, before in zip(PARTS, literal.net, first, strict=True):
        torch.testing.assert_close(state[f"network.{part}"], own.detach(), rtol=0, atol=1e-9)
        assert float((own.detach() - before).abs().max()) > 1e-3


def test_domain_weights_with_unequal_row_counts() -> None:
    run = Run(LossNetwork(normalize=True), rows=(2, 5, 3), weights=[3, 1, 2])
    literal = Literal(run, normalize=True, weights=[3, 1, 2])
    for k in range(5):
        literal.meta_step(k)
        literal.step(literal.objective(run.batch(k)[0], [2, 5, 3], learning=False))
        run.step()
        literal.expect_equal()


def test_virtual_step_uses_parameter_group_learning_rates() -> None:
    """A meta gradient by finite differences of the real thing: step, then validation loss."""
    run = Run(LossNetwork(learning_rate=1.0, weight_decay=0.0, hidden=3))
    parameters = list(run.model.parameters())
    rates = [0.3, 0.0, 0.05, 0.2]
    optimizer = torch.optim.SGD([{"params": [p], "lr": r} for p, r in zip(parameters, rates, strict=True)])
    signal = LossNetwork(learning_rate=1.0, weight_decay=0.0, hidden=3)
    mixer = mixwell.Mixer(run.model, optimizer, list(NAMES), horizon=1, signal=signal, probes=run.probes)
    before = [signal.state()[1][f"network.{part}"].clone() for part in PARTS]
    batch, labels = run.batch(0)
    with mixer.batch(labels) as rows:  # the round begins here
        rows.weighted_loss(row_losses(run.model, batch)).backward()
    moments = [signal.state()[1][f"network.{part}.exp_avg"] / 0.1 for part in PARTS]

    def meta(net: list[Tensor]) -> float:
        w1, b1, w2, b2 = net
        theta = [p.detach().clone().requires_grad_() for p in parameters]
        losses = losses_at(theta, joined([run.asides[name].at(0) for name in NAMES]))
        v = torch.sigmoid(torch.relu(losses.detach()[:, None] @ w1.T + b1) @ w2.T + b2).squeeze(1)
        gradients = torch.autograd.grad((v * losses).mean(), theta)
        moved = [p - r * g for p, r, g in zip(theta, rates, gradients, strict=True)]
        return losses_at(moved, run.aside.at(0)).mean().item()

    for part in range(4):
        for place in range(before[part].numel()):
            sides = []
            for sign in (1, -1):
                net = [one.clone() for one in before]
                net[part].view(-1)[place] += sign * 1e-5
                sides.append(meta(net))
            difference = (sides[0] - sides[1]) / 2e-5
            assert float(moments[part].view(-1)[place]) == pytest.approx(difference, abs=1e-8)


# ----------------------------------------------------------------------------------------- domains


@pytest.mark.parametrize("normalize", [False, True])
def test_domain_weight_is_mean_over_rows(normalize: bool) -> None:
    signal = LossNetwork("domains", normalize=normalize)
    run = Run(signal, SoftmaxWeights(), horizon=2, rows=(2, 6, 4), weights=[2, 1, 1])
    literal = Literal(run, normalize=normalize, weights=[2, 1, 1])
    first, counts = literal.domains, np.array([2, 6, 4])
    weights, sums = first, np.zeros(3)
    for k in range(6):
        if k % 2 == 0:
            literal.meta_step(k // 2)
            sums = np.zeros(3)
        batch, _ = run.batch(k)
        losses = losses_at(literal.theta, batch)
        v = literal.v(losses).detach().numpy()
        means = np.array([part.mean() for part in np.split(v, np.cumsum(counts)[:-1])])
        sums += means / (first @ means) if normalize else means
        literal.step((torch.from_numpy(np.repeat(weights / counts, counts)) * losses).sum())
        run.step()
        literal.expect_equal()
        if k % 2 == 1:
            weights = first * sums / (first @ sums)
            np.testing.assert_allclose(list(run.mixer.weights.last.values()), weights, atol=1e-9)


def test_permuted_and_duplicate_domains() -> None:
    def final(**settings: Any) -> dict[str, float]:
        return Run(LossNetwork("domains"), SoftmaxWeights(), horizon=2, **settings).go(6).mixer.weights.last

    plain = final()
    assert final(names=("noisy", "clean", "turned")) == pytest.approx(plain, rel=1e-8)
    doubled = final(
        names=("clean", "turned", "noisy", "copy"),
        rows=(4, 4, 4, 4),
        sources={"copy": "turned"},
        weights=[2, 1, 2, 1],
    )
    assert doubled["turned"] == pytest.approx(doubled["copy"], rel=1e-8)
    assert doubled["turned"] + doubled["copy"] == pytest.approx(plain["turned"], rel=1e-8)
    assert doubled["clean"] == pytest.approx(plain["clean"], rel=1e-8)


# ----------------------------------------------------------------------------------------- around it


@pytest.mark.parametrize("level", ["rows", "domains"])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_resume_is_bit_for_bit(level: Any, stop: int) -> None:
    def fresh() -> Run:
        return Run(LossNetwork(level), SoftmaxWeights() if level == "domains" else 1.0, horizon=3)

    whole = fresh().go(8)
    first, second = fresh().go(stop), fresh().go(2)  # a network that has learned something else
    second.take_over(first)
    second.go(8 - stop)
    np.testing.assert_array_equal(second.vector, whole.vector)
    np.testing.assert_array_equal(second.mixer.weights.history, whole.mixer.weights.history)
    assert second.mixer.rounds == whole.mixer.rounds
    for name, tensor in whole.signal.state()[1].items():
        assert torch.equal(second.signal.state()[1][name], tensor), name


def test_compute_matches_planned_cost() -> None:
    run = Run(LossNetwork(), rows=(2, 2, 2), probe_rows=2, budget=4)
    run.aside.rows = 6  # a step, the probes of all domains and a validation batch have 6 rows each
    run.go(4)
    extra = methods.find("meta-weight-net").extra(task())
    assert run.probes.spent == pytest.approx(6 * (extra.before + 4 * extra.per_step + 4 * extra.per_round))
    assert run.signal.nbytes == 3 * 301 * 8 + 4 * 4


def task(**settings: Any) -> MethodContext:
    options = methods.find("meta-weight-net").options.model_validate(settings)
    return MethodContext(
        domains=NAMES, rows=dict.fromkeys(NAMES, 100), batch_rows=12, steps=50, seed=3, options=options
    )


def test_recipe() -> None:
    method = methods.find("meta-weight-net")
    made = method.recipe(task())
    assert repr(made.signal) == (
        "LossNetwork(level='rows', normalize=False, hidden=100, learning_rate=0.001, seed=3, weight_decay=0.0001)"
    )
    assert isinstance(made.update, MirrorDescent)
    assert not made.signal.requirements.validation
    domains = method.recipe(task(level="domains", normalize=True, hidden=5))
    assert isinstance(domains.update, SoftmaxWeights)
    assert "'domains', normalize=True, hidden=5" in repr(domains.signal)


def test_network_depends_only_on_seed() -> None:
    def start(seed: int) -> Tensor:
        torch.manual_seed(seed + 11)
        before = torch.get_rng_state()
        signal = LossNetwork(seed=seed)
        run = Run(signal)
        del run
        torch.set_rng_state(before)
        return signal.state()[1]["network.in.weight"]

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))
    bounds = start(1)
    assert -1 <= float(bounds.min()) < -0.8
    assert 0.8 < float(bounds.max()) <= 1


def test_missing_requirements_raise() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    given = {name: (lambda: None) for name in NAMES}
    for probes in (None, Probes(model, mean_loss, given, None, row_losses)):
        with pytest.raises(ValueError, match=r"probes=Probes.*validation=\.\.\."):
            mixwell.Mixer(model, optimizer, NAMES, horizon=1, signal=LossNetwork(), probes=probes)
    with pytest.raises(ValueError, match="at least 1 hidden unit.* got 0"):
        LossNetwork(hidden=0)
    run = Run(LossNetwork())
    run.aside.at = lambda k: (torch.full((2, 3), torch.inf, dtype=torch.float64), torch.zeros(2).double())  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="of 'validation', computed outside of the training step"):
        run.step()
