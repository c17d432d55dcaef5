"""Skill-It and Aioli against their published rules, written down once more in plain numpy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from helpers.domain_quadratics import D, DomainLosses, M, Point
from helpers.toy_problems import mse, names
from mixwell import methods
from mixwell.signals.affinity import AffinitySignal, OnlineAffinity, SkillAffinity
from mixwell.signals.probes import Probes
from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

STEPS, ETA = 10, 0.05


class Feed:
    """Gives probe batches one after another, of the target last, and remembers how many."""

    def __init__(self, batch: Callable[[int, int], Any]) -> None:
        self.batch, self.taken = batch, [0] * (M + 1)

    def draw(self, j: int) -> Callable:
        def one():
            self.taken[j] += 1
            return self.batch(j, self.taken[j] - 1)

        return one

    def probes(self, model: nn.Module, loss: Callable) -> Probes:
        own = {name: self.draw(j) for j, name in enumerate(names(M))}
        return Probes(model, loss, own, self.draw(M))


def labeled(j: int, shift: np.ndarray) -> Tensor:
    return torch.tensor([[float(j), *shift]], dtype=torch.float64)


class Literal:
    """A run by the papers' words: rounds of SGD, and what is measured on copies between them."""

    def __init__(self, losses: DomainLosses, targets: str) -> None:
        self.losses, self.theta, self.done = losses, losses.start.copy(), 0
        self.watched = [M] if targets == "validation" else list(range(M))
        self.drawn = [0] * (M + 1)

    def fresh(self, j: int) -> np.ndarray:
        self.drawn[j] += 1
        return self.losses.shifts[j, self.drawn[j] - 1]

    def train(self, weights: np.ndarray, steps: int) -> None:
        for t in range(self.done, self.done + steps):
            slopes = [self.losses.gradient(j, self.theta, self.losses.train[t, j]) for j in range(M)]
            self.theta = self.theta - ETA * weights @ np.array(slopes)
        self.done += steps

    def look(self, theta: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
        return np.array([self.losses.value(j, theta, row) for j, row in zip(self.watched, rows, strict=True)])

    def probe(self, theta: np.ndarray, mixture: np.ndarray, steps: int) -> np.ndarray:
        for _ in range(steps):
            slope = np.zeros(D)
            for j in range(M):
                if mixture[j] > 0:
                    slope += mixture[j] * self.losses.gradient(j, theta, self.fresh(j))
            theta = theta - ETA * slope
        return theta


def skill_it(
    losses: DomainLosses, horizon: int, targets: str, *, eta: float, window: int, steps: int
) -> np.ndarray:
    """p_i ~ exp(eta sum over the last rounds and targets of A_ij L_j), A the relative fall by one domain alone."""
    run, weights, history = Literal(losses, targets), np.full(M, 1 / M), [np.full(M, 1 / M)]
    affinity, seen = None, []
    while run.done < STEPS:
        run.train(weights, min(horizon, STEPS - run.done))
        rows = [run.fresh(j) for j in run.watched]
        now = run.look(run.theta, rows)
        if affinity is None:
            ends = [run.look(run.probe(run.theta, np.eye(M)[i], steps), rows) for i in range(M)]
            affinity = np.array([(now - end) / now for end in ends])
        seen.append(now)
        raised = np.exp(eta * affinity @ np.sum(seen[-window:], axis=0))
        weights = raised / raised.sum()
        history.append(weights)
    return np.array(history)


def aioli(
    losses: DomainLosses,
    horizon: int,
    targets: str,
    *,
    eta: float,
    steps: int,
    sweeps: int,
    eps: float,
    chained: bool,
    ema: float | None,
    seed: int,
) -> np.ndarray:
    """LearnParams (its Algorithm 2), then p_i ~ p_i exp(eta sum_j A_ij), or with an EMA p_i ~ exp(...)."""
    run, weights, history = Literal(losses, targets), np.full(M, 1 / M), [np.full(M, 1 / M)]
    kept, index = None, 0
    while run.done < STEPS:
        run.train(weights, min(horizon, STEPS - run.done))
        rows = [run.fresh(j) for j in run.watched]
        mixtures = np.array([(1 - eps) * np.eye(M)[i] + eps / M for i in range(M)])
        beta, order = np.zeros((M, len(rows))), np.random.default_rng([seed, index])
        theta = run.theta
        for _ in range(sweeps):
            for i in order.permutation(M) if chained else range(M):
                start = theta if chained else run.theta
                end = run.probe(start, mixtures[i], steps)
                beta[i] += run.look(start, rows) - run.look(end, rows)
                theta = end
        found = np.linalg.inv(mixtures) @ (beta / sweeps)
        if found.min() < 0:
            found -= found.min()
        found /= found.sum()
        if ema is None:
            weights = weights * np.exp(eta * found.sum(axis=1))
        else:
            kept = found if kept is None else (1 - ema) * found + ema * kept
            weights = np.exp(eta * kept.sum(axis=1))
        weights = weights / weights.sum()
        history.append(weights)
        index += 1
    return np.array(history)


def play(losses: DomainLosses, horizon: int, signal: AffinitySignal, update: mixwell.Update) -> mixwell.Mixer:
    model = Point(losses.start)
    feed = Feed(lambda j, k: labeled(j, losses.shifts[j, k]))
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=ETA),
        names(M),
        budget=STEPS,
        horizon=horizon,
        signal=signal,
        update=update,
        probes=feed.probes(model, losses.torch_value),
    )
    for t in range(STEPS):
        for j, name in enumerate(names(M)):
            with mixer.domain(name):
                losses.torch_value(model, labeled(j, losses.train[t, j])).backward()
        mixer.step()
    return mixer


@pytest.mark.parametrize("targets", ["validation", "domains"])
@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_skill_it_matches_published_rule(horizon: int, targets) -> None:
    for seed in range(3):
        losses = DomainLosses(seed, steps=STEPS, probes=400)
        mixer = play(
            losses,
            horizon,
            SkillAffinity(eta=0.4, window=3, targets=targets, probe_steps=6),
            SoftmaxWeights(),
        )
        expected = skill_it(losses, horizon, targets, eta=0.4, window=3, steps=6)
        assert mixer.weights.history == pytest.approx(expected, abs=1e-11)
        assert np.ptp(expected[1]) > 0.01


DIALECTS = {
    "published": {"sweeps": 4, "eps": 0.75, "chained": True, "ema": None},
    "running mean": {"sweeps": 2, "eps": 0.75, "chained": True, "ema": 0.5},
    "one-hot": {"sweeps": 1, "eps": 0.0, "chained": True, "ema": None},
    "from the model each time": {"sweeps": 2, "eps": 0.3, "chained": False, "ema": None},
}


@pytest.mark.parametrize("targets", ["validation", "domains"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("horizon", [1, 4])
def test_aioli_matches_published_rule(horizon: int, dialect: str, targets) -> None:
    settings = DIALECTS[dialect]
    eta, ema = 0.5, settings["ema"]
    signal = OnlineAffinity(
        eta=1.0 if ema is None else eta,
        memory=ema,
        targets=targets,
        probe_steps=3,
        sweeps=settings["sweeps"],
        smoothing=settings["eps"],
        chained=settings["chained"],
        seed=7,
    )
    losses = DomainLosses(4, steps=STEPS, probes=400)
    mixer = play(losses, horizon, signal, MirrorDescent(eta) if ema is None else SoftmaxWeights())
    expected = aioli(losses, horizon, targets, eta=eta, steps=3, seed=7, **settings)
    assert mixer.weights.history == pytest.approx(expected, abs=1e-11)
    assert np.ptp(expected[-1]) > 0.01


def test_one_round_matches_hand_computation() -> None:
    """Losses theta and -theta, the target is theta: a step on the first lowers 2 to 1.9, the other raises it."""
    model = nn.ParameterDict({"theta": nn.Parameter(torch.tensor(2.0, dtype=torch.float64))})

    def loss(net: nn.ParameterDict, batch: Tensor) -> Tensor:
        return net["theta"] * batch[0]

    def made(signal: AffinitySignal, update: mixwell.Update) -> dict[str, float]:
        with torch.no_grad():
            model["theta"].fill_(2.0)
        probes = Probes(
            model, loss, {"up": lambda: torch.ones(1), "down": lambda: -torch.ones(1)}, lambda: torch.ones(1)
        )
        mixer = mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ["up", "down"],
            horizon=1,
            signal=signal,
            update=update,
            probes=probes,
        )
        for name, sign in (("up", 1.0), ("down", -1.0)):
            with mixer.domain(name):
                loss(model, torch.tensor([sign])).backward()
        mixer.step()  # with equal weights nothing moves
        assert model["theta"].item() == 2.0
        scores = mixer.rounds[-1].scores
        assert model["theta"].item() == 2.0
        return scores

    # Relative falls of .05 and -.05, times a loss of 2 and eta of 3.
    kept = made(SkillAffinity(eta=3.0, probe_steps=1), SoftmaxWeights())
    assert kept == pytest.approx({"up": -0.3, "down": 0.3})
    # A = (.1, -.1); the least is taken away: (.2, 0); divided by the sum: (1, 0). Whatever the smoothing.
    for smoothing in (0.0, 0.75):
        fresh = made(OnlineAffinity(probe_steps=1, smoothing=smoothing), MirrorDescent(1.0))
        assert fresh == pytest.approx({"up": -1.0, "down": 0.0}, abs=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("chained", [False, True])
def test_affinity_is_recovered_from_mixtures(smoothing: float, chained: bool) -> None:
    """Falls of linear losses are linear in the mixture: A is steps x eta x the gradients' inner products."""
    slopes = np.random.default_rng(0).normal(size=(M, D))
    model = Point(np.zeros(D))

    def loss(net: Point, batch: Tensor) -> Tensor:
        return torch.from_numpy(slopes[int(batch[0])]) @ net.theta + 5.0

    probes = Probes(model, loss, {name: lambda j=j: torch.tensor([j]) for j, name in enumerate(names(M))})
    signal = OnlineAffinity(targets="domains", probe_steps=2, sweeps=3, smoothing=smoothing, chained=chained)
    optimizer = torch.optim.SGD(model.parameters(), lr=ETA)
    mixer = mixwell.Mixer(model, optimizer, names(M), horizon=1, signal=signal, probes=probes)
    for j, name in enumerate(names(M)):
        with mixer.domain(name):
            loss(model, torch.tensor([j])).backward()
    mixer.step()
    found = np.array(list(mixer.rounds[-1].scores.values()))
    affinity = 2 * ETA * slopes @ slopes.T
    affinity -= affinity.min()
    assert found == pytest.approx(-(affinity / affinity.sum()).sum(axis=1), abs=1e-12)


def task(method: methods.Method, **options) -> methods.MethodContext:
    return methods.MethodContext(
        domains=tuple(names(M)),
        rows=dict.fromkeys(names(M), 500),
        batch_rows=15,
        steps=12,
        seed=3,
        horizon=4,
        options=method.options.model_validate(options),
    )


def test_given_affinity_sets_initial_weights() -> None:
    method = methods.find("skill-it")
    affinity = [[0.5], [0.1], [-0.2]]
    recipe = method.recipe(task(method, affinity=affinity, eta=2.0))
    losses = DomainLosses(0, steps=STEPS, probes=400)
    model = Point(losses.start)
    feed = Feed(lambda j, k: labeled(j, losses.shifts[j, k]))
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=ETA),
        names(M),
        horizon=1,
        signal=recipe.signal,
        update=recipe.update,
        weights=recipe.weights,
        probes=feed.probes(model, losses.torch_value),
    )
    raised = np.exp(2.0 * np.array(affinity).sum(axis=1))
    assert mixer.weights.values == pytest.approx(raised / raised.sum())
    assert mixer.signal.nbytes == 0  # no copy is needed
    for t in range(2):
        for j, name in enumerate(names(M)):
            with mixer.domain(name):
                losses.torch_value(model, labeled(j, losses.train[t, j])).backward()
        mixer.step()
    assert feed.taken == [0, 0, 0, 2]
    with pytest.raises(ValueError, match="a row for each of the 3 domains, with 1 numbers"):
        bad = method.recipe(task(method, affinity=[[1.0, 2.0]] * M))
        mixwell.Mixer(
            model, mixer._optimizer, names(M), horizon=1, signal=bad.signal, probes=feed.probes(model, mse)
        )


# ------------------------------------------------------------------------------------------------ networks

WIDE = 6


class Recording(nn.Module):
    """Remembers in which mode it was run."""

    seen: list[bool]

    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training)
        return x

    def __deepcopy__(self, memo: dict) -> Recording:
        return Recording(self.seen)


def network(seen: list[bool] | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)]
    return nn.Sequential(*layers, Recording([] if seen is None else seen))


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(wide: int) -> Tensor:
        return torch.randn(5, wide, generator=generator)

    return [(normal(WIDE), normal(2)) for _ in range(count)]


TRAIN = [
    dict(zip(names(M), one, strict=True)) for one in zip(*(batches(j, 12) for j in range(M)), strict=True)
]
PROBES = [batches(10 + j, 200) for j in range(M + 1)]


def build(signal: mixwell.Signal, *, horizon: int = 4, seen: list[bool] | None = None) -> tuple:
    model, feed = network(seen), Feed(lambda j, k: PROBES[j][k])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    update = (
        MirrorDescent(1.0)
        if isinstance(signal, OnlineAffinity) and signal.memory is None
        else SoftmaxWeights()
    )
    mixer = mixwell.Mixer(
        model,
        optimizer,
        names(M),
        budget=12,
        horizon=horizon,
        signal=signal,
        update=update,
        clip_norm=0.5,
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


def test_copies_train_like_model_and_evaluate_without_dropout() -> None:
    seen: list[bool] = []
    model, optimizer, mixer, _ = build(SkillAffinity(probe_steps=3, targets="domains"), horizon=2, seen=seen)
    train(mixer, model, range(1))
    for name, batch in TRAIN[1].items():
        with mixer.domain(name):
            mse(model, batch).backward()
    mixer.before_step()
    optimizer.step()
    optimizer.zero_grad()
    before, random = copy.deepcopy((model, optimizer)), torch.get_rng_state()
    seen.clear()
    mixer.after_step()
    scores = np.array(list(mixer.rounds[-1].scores.values()))
    look, step = [False] * M, [True]
    assert seen == look + (step * 3 + look) * M
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0].state_dict()[key]), key

    # The same with plain torch; clipping shortens a copy's gradient as it did the model's in the last step.
    clip = mixer.signal._clip
    assert 0 < clip < 1
    targets = [PROBES[j][0] for j in range(M)]

    def losses(net: nn.Module) -> np.ndarray:
        net.eval()
        with torch.no_grad():
            return np.array([float(mse(net, batch)) for batch in targets])

    now = losses(before[0])
    affinity = np.zeros((M, M))
    for i in range(M):
        net, opt = copy.deepcopy(before)
        net.train()
        for k in range(3):
            torch.set_rng_state(
                random
            )  # every step has masks of its own, and the run's stream stays where it is
            torch.manual_seed(int(torch.randint(2**62, ())) + 3 * i + k)
            opt.zero_grad()
            (clip * mse(net, PROBES[i][1 + k])).backward()
            opt.step()
        affinity[i] = (now - losses(net)) / now
    assert scores == pytest.approx(-0.2 * affinity @ now, rel=1e-3)


SIGNALS = {
    "skill-it": lambda: SkillAffinity(probe_steps=2),
    "aioli": lambda: OnlineAffinity(probe_steps=1, sweeps=2),
    "aioli with a running mean": lambda: OnlineAffinity(
        probe_steps=1, sweeps=1, memory=0.5, targets="domains"
    ),
}


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("stop", [2, 4, 7, 8])
def test_resume_in_mid_round_is_bit_for_bit(signal: str, stop: int, tmp_path: Path) -> None:
    model, _, whole, _ = build(SIGNALS[signal]())
    torch.manual_seed(3)
    train(whole, model, range(12))

    first, first_optimizer, mixer, first_feed = build(SIGNALS[signal]())
    torch.manual_seed(3)
    train(mixer, first, range(stop))
    mixer.save(tmp_path / "mixer")
    random = torch.get_rng_state()
    second, second_optimizer, resumed, feed = build(SIGNALS[signal]())
    second.eval()  # whatever the mode is, copies are trained as the model was
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
    resumed.load(tmp_path / "mixer")
    feed.taken = list(first_feed.taken)
    torch.set_rng_state(random)
    train(resumed, second, range(stop, 12))
    np.testing.assert_array_equal(resumed.weights.history, whole.weights.history)
    assert np.ptp(whole.weights.history[-1]) > 0
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


CASES = [
    ("skill-it", {"probe_steps": 4}),
    ("skill-it", {"probe_steps": 2, "targets": "domains"}),
    ("aioli", {"probe_steps": 2, "sweeps": 2}),
    ("aioli", {"probe_steps": 2, "sweeps": 1, "smoothing": 0.0, "targets": "domains"}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_cost(name: str, options: dict) -> None:
    method = methods.find(name)
    asked = task(method, **options)
    signal = method.recipe(asked).signal
    model, _, mixer, _ = build(signal)
    validation = {id(one) for one in PROBES[M]}
    probes = signal._probes
    seen, charge = [], probes.charge

    def charged(batch, times: float = 1.0) -> None:
        # The validation batches here have 5 rows where a run's have as many as a training step.
        seen.append(times * (15 if id(batch) in validation else 5))
        charge(batch, times)

    probes.charge = charged
    train(mixer, model, range(12))
    extra = method.extra(asked)
    assert sum(seen) == pytest.approx(15 * (extra.before + 3 * extra.per_round))
    # A copy with AdamW's moments: three times the trained parameters, counts of steps, and BatchNorm's buffers.
    trained = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert signal.nbytes == 3 * trained + buffers + 4 * len(list(model.parameters()))


def test_default_horizons() -> None:
    for name, steps, expected in (("skill-it", 5000, 500), ("aioli", 5000, 250), ("aioli", 7, 1)):
        horizon = methods.find(name).horizon
        assert horizon is not None
        assert horizon(steps) == expected


def test_nonfinite_losses_are_not_kept() -> None:
    losses = DomainLosses(0, steps=STEPS, probes=400)
    for make in (lambda: SkillAffinity(probe_steps=2), lambda: OnlineAffinity(probe_steps=2, memory=0.5)):
        model = Point(losses.start)
        feed = Feed(lambda j, k: labeled(j, losses.shifts[j, k]))
        wrong = [True]

        def loss(net: Point, batch: Tensor, model=model, wrong=wrong) -> Tensor:
            value = losses.torch_value(net, batch)
            return value * float("inf") if wrong[0] and net is not model else value

        mixer = mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=ETA),
            names(M),
            horizon=1,
            signal=make(),
            update=SoftmaxWeights(),
            on_nonfinite="skip",
            probes=feed.probes(model, loss),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for t in range(2):
                for j, name in enumerate(names(M)):
                    with mixer.domain(name):
                        losses.torch_value(model, labeled(j, losses.train[t, j])).backward()
                mixer.step()
                wrong[0] = False
        history = mixer.weights.history
        np.testing.assert_array_equal(history[0], history[1])
        assert np.isfinite(history[2]).all()
        assert np.ptp(history[2]) > 0


def test_error_messages() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    feed = Feed(lambda j, k: PROBES[j][k])
    own = {name: feed.draw(j) for j, name in enumerate(names(M))}

    def mixer(signal: AffinitySignal, probes: Probes | None) -> mixwell.Mixer:
        return mixwell.Mixer(model, optimizer, names(M), horizon=1, signal=signal, probes=probes)

    with pytest.raises(ValueError, match=r"give Mixer\(..., probes=Probes\("):
        mixer(OnlineAffinity(), None)
    with pytest.raises(ValueError, match=r"validation=\.\.\."):
        mixer(OnlineAffinity(), Probes(model, mse, own))
    signal = OnlineAffinity(targets="domains")
    mixer(signal, Probes(model, mse, own))
    with pytest.raises(ValueError, match="this OnlineAffinity is in use by another mixer"):
        mixer(signal, Probes(model, mse, own))
    with pytest.raises(ValueError, match="affinity must be finite"):
        mixer(SkillAffinity(affinity=[[float("nan")]] * M), feed.probes(model, mse))
    for settings in (
        {"targets": "all"},
        {"probe_steps": 0},
        {"sweeps": 0},
        {"smoothing": 1.0},
        {"learning_rate": 0.0},
        {"eta": -1.0},
        {"memory": 1.0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
            OnlineAffinity(**settings)
    with pytest.raises(ValueError, match="window must be"):
        SkillAffinity(window=0)
