"""TANDEM against its published rule, written down once more in plain numpy (and for AdamW in plain torch)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from helpers.domain_quadratics import D, DomainLosses, M, Point
from helpers.toy_problems import mse, names
from mixwell import methods
from mixwell.signals.probes import Probes
from mixwell.signals.twin_networks import TwinNetworks
from mixwell.simplex.updates import ProjectedDescent

STEPS = 10
ETA, STEP_SIZE = 0.05, 0.3


class Feed:
    """Gives probe batches one after another, and remembers how many."""

    def __init__(self, batches: Sequence[Sequence]) -> None:
        self.batches, self.taken = batches, [0] * len(batches)

    def draw(self, j: int) -> Callable:
        def one():
            self.taken[j] += 1
            return self.batches[j][self.taken[j] - 1]

        return one

    def probes(self, model: nn.Module, loss: Callable) -> Probes:
        own = {name: self.draw(j) for j, name in enumerate(names(len(self.batches) - 1))}
        return Probes(model, loss, own, self.draw(len(self.batches) - 1))


def labeled(j: int, shift: np.ndarray) -> Tensor:
    return torch.tensor([[float(j), *shift]], dtype=torch.float64)


def nearest_on_simplex(point: np.ndarray) -> np.ndarray:
    """By bisection for the threshold, to be independent of sorting."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


def published(losses: DomainLosses, horizon: int, probe_steps: int, gamma: float, eta_w: float) -> np.ndarray:
    """Episodes of free steps, then K steps of both networks, then the update."""
    alpha, u, w = np.full(M, 1 / M), losses.start.copy(), np.zeros(D)
    drawn, history, done = [0] * (M + 1), [np.full(M, 1 / M)], 0

    def fresh(j: int) -> np.ndarray:
        drawn[j] += 1
        return losses.shifts[j, drawn[j] - 1]

    while done < STEPS:
        length = min(horizon, STEPS - done)
        for t in range(length):
            left = length - t
            if left == min(probe_steps, length):
                w = u.copy()
            if left <= probe_steps:
                slope = losses.gradient(M, w, fresh(M))
                for j in range(M):
                    slope = slope + gamma * alpha[j] * losses.gradient(j, w, fresh(j))
                w = w - eta_w * slope
            u = u - ETA * sum(alpha[j] * losses.gradient(j, u, losses.train[done, j]) for j in range(M))
            done += 1
        rows = [fresh(j) for j in range(M)]
        apart = [losses.value(j, w, rows[j]) - losses.value(j, u, rows[j]) for j in range(M)]
        alpha = nearest_on_simplex(alpha - STEP_SIZE * gamma * np.array(apart))
        history.append(alpha)
    return np.array(history)


def run(losses: DomainLosses, horizon: int, signal: TwinNetworks) -> mixwell.Mixer:
    model = Point(losses.start)
    feed = Feed([[labeled(j, shift) for shift in losses.shifts[j]] for j in range(M + 1)])
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=ETA),
        names(M),
        budget=STEPS,
        horizon=horizon,
        signal=signal,
        update=ProjectedDescent(STEP_SIZE),
        probes=feed.probes(model, losses.torch_value),
    )
    for t in range(STEPS):
        for j, name in enumerate(names(M)):
            with mixer.domain(name):
                losses.torch_value(model, labeled(j, losses.train[t, j])).backward()
        mixer.step()
    return mixer


@pytest.mark.parametrize(
    ("horizon", "probe_steps", "gamma"), [(1, 5, 1.0), (1, 1, 2.0), (4, 2, 1.0), (5, 5, 0.5), (6, 4, 1.0)]
)
def test_weights_match_published_rule(horizon: int, probe_steps: int, gamma: float) -> None:
    for seed in range(3):
        losses = DomainLosses(seed, steps=STEPS, probes=60)
        mixer = run(losses, horizon, TwinNetworks(probe_steps=probe_steps, gamma=gamma))
        expected = published(losses, horizon, probe_steps, gamma, ETA)
        assert mixer.weights.history == pytest.approx(expected, abs=1e-11)
        assert np.ptp(expected[-1]) > 0.05


def test_twin_can_have_other_learning_rate() -> None:
    losses = DomainLosses(3, steps=STEPS, probes=60)
    mixer = run(losses, 4, TwinNetworks(probe_steps=3, learning_rate=0.02))
    assert mixer.weights.history == pytest.approx(published(losses, 4, 3, 1.0, 0.02), abs=1e-11)


def test_one_step_matches_hand_computation() -> None:
    """Two parabolas around 1 and -1, the target is the first: u stays at 0, w goes to 0.1."""
    model = Point(np.zeros(1))

    def loss(net: Point, batch: Tensor) -> Tensor:
        return (net.theta - batch[0]).square().sum() / 2

    rows = {"near": torch.ones(1), "far": -torch.ones(1)}
    probes = Probes(model, loss, {k: lambda k=k: rows[k] for k in rows}, lambda: rows["near"])
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        list(rows),
        horizon=1,
        signal=TwinNetworks(),
        update=ProjectedDescent(1.0),
        probes=probes,
    )
    for name, batch in rows.items():
        with mixer.domain(name):
            loss(model, batch).backward()
    mixer.step()
    record = mixer.rounds[-1]
    assert record.scores == pytest.approx({"near": -0.095, "far": 0.105})
    assert mixer.weights.last == pytest.approx({"near": 0.6, "far": 0.4})


# ------------------------------------------------------------------------------------------------ networks

WIDE = 6


def network(seed: int = 0) -> nn.Module:
    # No bias before BatchNorm: its gradient is rounding, of which Adam would make steps of full length.
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDE, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    )


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(wide: int) -> Tensor:
        return torch.randn(5, wide, generator=generator)

    return [(normal(WIDE), normal(2)) for _ in range(count)]


TRAIN = [
    dict(zip(names(M), one, strict=True)) for one in zip(*(batches(j, 12) for j in range(M)), strict=True)
]
PROBES = [batches(10 + j, 100) for j in range(M + 1)]


def build(
    signal: mixwell.Signal, *, horizon: int = 4, clip_norm: float | None = 0.5
) -> tuple[nn.Module, torch.optim.Optimizer, mixwell.Mixer, Feed]:
    model, feed = network(), Feed(PROBES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    mixer = mixwell.Mixer(
        model,
        optimizer,
        names(M),
        budget=12,
        horizon=horizon,
        signal=signal,
        update=ProjectedDescent(1.0),
        clip_norm=clip_norm,
        probes=feed.probes(model, mse),
    )
    return model, optimizer, mixer, feed


def train(mixer: mixwell.Mixer, model: nn.Module, steps: range) -> None:
    for t in steps:
        model.train()
        for name, batch in TRAIN[t].items():
            with mixer.domain(name):
                mse(model, batch).backward()
        mixer.step()


def test_twin_trains_like_model() -> None:
    """AdamW with its moments, dropout, BatchNorm and clipping: the same with plain torch."""
    model, optimizer, mixer, _ = build(TwinNetworks(probe_steps=2))
    train(mixer, model, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    twin.train()
    for t in (2, 3):
        before = [p.detach().clone() for p in model.parameters()]
        # What clipping will do to the model's gradient in this step.
        probe, state = copy.deepcopy(model).train(), torch.get_rng_state()
        for name, batch in TRAIN[t].items():
            (mse(probe, batch) / M).backward()
            if (t, name) == (2, "d0"):  # twins are made when a step's first gradient is there
                for own, other in zip(twin.buffers(), probe.buffers(), strict=True):
                    own.copy_(other)
        clip = min(1.0, 0.5 / (float(nn.utils.get_total_norm([p.grad for p in probe.parameters()])) + 1e-6))
        after = torch.get_rng_state()  # the twin's dropout goes on from where the model's was
        twin_optimizer.zero_grad()
        mse(twin, PROBES[M][t - 2]).backward()
        for j in range(M):
            (mse(twin, PROBES[j][t - 2]) / M).backward()
        for p in twin.parameters():
            assert p.grad is not None
            p.grad *= clip
        twin_optimizer.step()
        torch.set_rng_state(state)
        train(mixer, model, range(t, t + 1))
        assert torch.equal(torch.get_rng_state(), after)
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    twin.eval()
    model.eval()
    with torch.no_grad():
        expected = [float(mse(twin, PROBES[j][2]) - mse(model, PROBES[j][2])) for j in range(M)]
    assert list(mixer.rounds[-1].scores.values()) == pytest.approx(expected, rel=1e-4)


def test_training_is_not_changed_by_twin() -> None:
    runs = []
    for signal in (TwinNetworks(), mixwell.ConstantWeights()):
        model, _, mixer, _ = build(signal, horizon=12)
        torch.manual_seed(5)
        train(mixer, model, range(12))
        assert all(module.training for module in model.modules())
        runs.append(({**model.state_dict()}, torch.get_rng_state()))
    for key, tensor in runs[0][0].items():
        assert torch.equal(tensor, runs[1][0][key]), key
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("stop", [1, 3, 4, 6, 7, 10])
def test_resume_in_mid_round_is_bit_for_bit(stop: int, tmp_path: Path) -> None:
    def make() -> tuple:
        return build(TwinNetworks(probe_steps=3))

    model, _, whole, _ = make()
    torch.manual_seed(3)
    train(whole, model, range(12))

    first, first_optimizer, mixer, first_feed = make()
    torch.manual_seed(3)
    train(mixer, first, range(stop))
    mixer.save(tmp_path / "mixer")
    random = torch.get_rng_state()
    second, second_optimizer, resumed, feed = make()
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
    resumed.load(tmp_path / "mixer")
    feed.taken = list(first_feed.taken)
    torch.set_rng_state(random)
    train(resumed, second, range(stop, 12))
    np.testing.assert_array_equal(resumed.weights.history, whole.weights.history)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


def test_scheduler_and_mixed_batches() -> None:
    model = nn.Linear(WIDE, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    signal, feed = TwinNetworks(probe_steps=2), Feed(PROBES)
    mixer = mixwell.Mixer(
        model, optimizer, names(M), horizon=3, signal=signal, update=1.0, probes=feed.probes(model, mse)
    )
    labels = np.repeat(np.arange(M), 5)
    for step in TRAIN[:6]:
        inputs, targets = (torch.cat([pair[i] for pair in step.values()]) for i in (0, 1))
        with mixer.batch(labels) as batch:
            batch.weighted_loss((model(inputs) - targets).square().mean(dim=1)).backward()
        mixer.step()
        schedule.step()
    assert len(mixer.rounds) == 2
    assert all(abs(score) > 0 for score in mixer.rounds[1].scores.values())
    # The twin is a copy of the parameters, with one moment for each.
    assert signal.nbytes == 2 * sum(p.nbytes for p in model.parameters())


def test_cost() -> None:
    method = methods.find("tandem")
    options = method.options.model_validate({"probe_steps": 3})
    task = methods.MethodContext(
        domains=tuple(names(M)),
        rows=dict.fromkeys(names(M), 500),
        batch_rows=15,
        steps=12,
        horizon=4,
        options=options,
    )
    recipe = method.recipe(task)
    model, _, mixer, _ = build(recipe.signal)
    probes = recipe.signal._probes
    train(mixer, model, range(12))
    # The validation batches here have 5 rows where a run's have as many as a training step.
    missing = 3 * 3 * (15 - 5)
    assert probes.spent + missing == pytest.approx(3 * method.extra(task).per_round * 15)
    assert repr(recipe.update) == "ProjectedDescent(5.0)"


def test_diverging_twin_skips_update() -> None:
    losses = DomainLosses(0, steps=STEPS, probes=60)
    with pytest.raises(FloatingPointError, match="score of d0, d1, d2 overflowed"):
        run(losses, 5, TwinNetworks(learning_rate=1e200))

    model = Point(losses.start)
    feed = Feed([[labeled(j, shift) for shift in losses.shifts[j]] for j in range(M + 1)])
    wrong = [True]

    def loss(net: Point, batch: Tensor) -> Tensor:
        value = losses.torch_value(net, batch)
        return value * float("nan") if wrong[0] and net is not model else value

    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=ETA),
        names(M),
        horizon=2,
        signal=TwinNetworks(),
        update=ProjectedDescent(1.0),
        on_nonfinite="skip",
        probes=feed.probes(model, loss),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(4):
            for j, name in enumerate(names(M)):
                with mixer.domain(name):
                    losses.torch_value(model, labeled(j, losses.train[t, j])).backward()
            mixer.step()
            if mixer.round_ended is not None:
                wrong[0] = False
    history = mixer.weights.history
    np.testing.assert_array_equal(history[0], history[1])
    assert np.ptp(history[2]) > 0


def test_error_messages() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    feed = Feed(PROBES)

    def mixer(probes: Probes | None, signal: TwinNetworks | None = None) -> mixwell.Mixer:
        return mixwell.Mixer(
            model, optimizer, names(M), horizon=1, signal=signal or TwinNetworks(), probes=probes
        )

    with pytest.raises(ValueError, match=r"give Mixer\(..., probes=Probes\("):
        mixer(None)
    own = {name: feed.draw(j) for j, name in enumerate(names(M))}
    with pytest.raises(ValueError, match=r"validation=\.\.\."):
        mixer(Probes(model, mse, own))
    with pytest.raises(ValueError, match="have none of d0"):
        mixer(Probes(model, mse, {k: v for k, v in own.items() if k != "d0"}, feed.draw(M)))
    with pytest.raises(ValueError, match="another model than the one that is trained"):
        mixer(Probes(network(), mse, own, feed.draw(M)))
    signal = TwinNetworks()
    mixer(feed.probes(model, mse), signal)
    with pytest.raises(ValueError, match="in use by another mixer"):
        mixer(feed.probes(model, mse), signal)
    for settings in ({"probe_steps": 0}, {"gamma": 0.0}, {"learning_rate": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
            TwinNetworks(**settings)
