"""MentorNet (Jiang et al. 2018): its rules written out beside a real run."""

from __future__ import annotations

import math
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
from mixwell.signals.row_curriculum import GivenRowCurriculum, LearnedRowCurriculum, _percentile
from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights


class Pace:
    """lambda: the moving average of the batches' percentile, its start at zero taken out."""

    def __init__(self, percentile: float, decay: float) -> None:
        self.percentile, self.decay = percentile, decay
        self.values: list[float] = []

    def see(self, losses: np.ndarray) -> float:
        self.values.append(float(np.quantile(losses, self.percentile, method="inverted_cdf")))
        shares = self.decay ** np.arange(len(self.values))[::-1]
        return float((shares * self.values).sum() / shares.sum())


def stepped(theta: list[Tensor], loss: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(loss, theta)
    return [(p - LR * g).detach().requires_grad_() for p, g in zip(theta, gradients, strict=True)]


def flat(theta: list[Tensor]) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in theta]).numpy()


# ----------------------------------------------------------------------------------------- a given curriculum


def self_paced(losses: np.ndarray, pace: float) -> np.ndarray:
    return (losses <= pace).astype(float)


def linear(losses: np.ndarray, pace: float) -> np.ndarray:
    return np.clip(1 - losses / pace, 0, 1)


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("curriculum", "rule"), [("self-paced", self_paced), ("linear", linear)])
def test_rows_are_weighted_by_their_losses(curriculum: Any, rule: Any, normalize: bool, horizon: int) -> None:
    signal = GivenRowCurriculum(
        curriculum=curriculum, steps=12, percentile=0.6, decay=0.8, burn_in=0.25, normalize=normalize
    )
    run = Run(signal, horizon=horizon, budget=12)
    theta, pace = copies(run.model), Pace(0.6, 0.8)
    left_out, shares = 0, []
    for k in range(12):
        batch, _ = run.batch(k)
        losses = losses_at(theta, batch)
        known = losses.detach().numpy()
        threshold = pace.see(known)
        v = np.ones(12) if k < 3 else rule(known, threshold)
        left_out += int((v == 0).sum())
        v = v / v.mean() if normalize else v
        shares.append(v.reshape(3, 4).mean(axis=1))
        loss = (torch.from_numpy(v) * losses).mean()
        theta = stepped(theta, loss)
        run.step()
        assert run.seen[-1] == pytest.approx(loss.item(), abs=1e-10)
        np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)
        if k % horizon == horizon - 1:
            got = np.mean(shares[-horizon:], axis=0)
            measured = run.mixer.rounds[-1].measured
            np.testing.assert_allclose([measured[f"share.{n}"] for n in NAMES], got / got.sum(), atol=1e-10)
    assert left_out > 10
    np.testing.assert_allclose(run.mixer.weights.history, 1 / 3)
    assert run.probes.spent == 0


def test_matches_hand_computation() -> None:
    """Losses 1, 2, 3, 4: three of four rows are the 75th percentile, 3; then 2, 4, 6, 8."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        ["a", "b"],
        horizon=2,
        signal=GivenRowCurriculum(curriculum="linear", steps=2, percentile=0.75, decay=0.5, burn_in=0.0),
        update=1.0,
    )
    seen = []
    for scale in (1.0, 2.0):
        x = scale * torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
        with mixer.batch(["a", "a", "b", "b"]) as batch:
            loss = batch.weighted_loss(model(x).squeeze(1))
            loss.backward()
        seen.append(loss.item())
        mixer.step()
    # lambda = 3: v = 2/3, 1/3, 0, 0 and the mean of v l is 4/3 / 4.
    assert seen[0] == pytest.approx(1 / 3)
    # lambda = (3/2 + 6) / (3/2) = 5: v = 3/5, 1/5, 0, 0 and v l = 6/5, 4/5.
    assert seen[1] == pytest.approx(1 / 2)
    record = mixer.rounds[-1]
    assert record.measured == {"share.a": 1.0, "share.b": 0.0, "rows_used": 0.5}


def test_percentile_is_weighted_by_rows() -> None:
    losses = np.array([4.0, 1.0, 3.0, 2.0])
    assert _percentile(losses, np.full(4, 0.25), 0.75) == 3
    assert _percentile(losses, np.full(4, 0.25), 0.0) == 1
    assert _percentile(losses, np.full(4, 0.25), 1.0) == 4
    assert _percentile(losses, np.array([0.7, 0.1, 0.1, 0.1]), 0.3) == 3
    assert _percentile(losses, np.array([0.7, 0.1, 0.1, 0.1]), 0.31) == 4
    random = np.random.default_rng(0)
    for _ in range(20):
        losses = random.normal(size=10)
        for share in np.arange(11) / 10:
            expected = np.sort(losses)[max(math.ceil(round(10 * share, 6)) - 1, 0)]
            assert _percentile(losses, np.full(10, 0.1), share) == expected


def test_zero_and_nonfinite_losses() -> None:
    signal = GivenRowCurriculum(curriculum="linear", steps=1, burn_in=0.0)
    zeros = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert signal._curriculum(zeros, 0.0, None).tolist() == [1.0, 0.0]  # type: ignore[arg-type]
    paced = GivenRowCurriculum(curriculum="self-paced", steps=1)
    found = paced._curriculum(torch.tensor([math.nan, 0.0]), 1.0, None)  # type: ignore[arg-type]
    assert found.isnan().tolist() == [True, False]


def test_nonfinite_step_leaves_no_state() -> None:
    def run() -> Run:
        signal = GivenRowCurriculum(curriculum="linear", steps=6, burn_in=0.0)
        return Run(signal, horizon=3, on_nonfinite="skip")

    broken, plain = run(), run()
    (x, y), labels = broken.batch(0)
    with pytest.warns(UserWarning, match="non-finite"):
        broken.step((x, torch.where(torch.arange(12) == 3, math.inf, y)), labels)
    for k in (1, 2):
        broken.step()
        plain.step(*plain.batch(k))
    assert broken.signal._average == plain.signal._average
    np.testing.assert_array_equal(broken.vector, plain.vector)


def test_given_curricula_per_domain() -> None:
    signal = GivenRowCurriculum(
        "domains", curriculum="linear", steps=6, percentile=0.9, decay=0.5, burn_in=0.0
    )
    run = Run(signal, SoftmaxWeights(), horizon=3, rows=(2, 6, 4), weights=[2, 1, 1])
    first, counts = np.array([0.5, 0.25, 0.25]), np.array([2, 6, 4])
    theta, average, sums, weights = copies(run.model), 0.0, np.zeros(3), first
    for k in range(6):
        losses = losses_at(theta, run.batch(k)[0])
        known = losses.detach().numpy()
        order = np.argsort(known)
        reached = np.cumsum(np.repeat(first / counts, counts)[order])
        average = 0.5 * average + 0.5 * known[order][np.flatnonzero(reached > 0.9 - 1e-12)[0]]
        v = linear(known, average / (1 - 0.5 ** (k + 1)))
        if k % 3 == 0:
            sums = np.zeros(3)
        sums += np.array([part.mean() for part in np.split(v, np.cumsum(counts)[:-1])])
        theta = stepped(theta, (torch.from_numpy(np.repeat(weights / counts, counts)) * losses).sum())
        run.step()
        np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)
        if k % 3 == 2:
            weights = first * sums / (first @ sums)
            np.testing.assert_allclose(list(run.mixer.weights.last.values()), weights, atol=1e-10)
    assert weights[2] < 0.2  # the noisy domain has the greatest losses


# ----------------------------------------------------------------------------------------- a learned one

PARTS = ("in.weight", "in.bias", "out.weight", "out.bias", "embeddings")


class Literal:
    """The data-driven rule: a network of loss, its difference to lambda, domain and time, and its targets."""

    def __init__(self, run: Run, steps: int, decay: float) -> None:
        state = run.signal.state()[1]
        self.run, self.steps = run, steps
        self.theta = copies(run.model)
        self.net = [state[f"network.{part}"].detach().clone().requires_grad_() for part in PARTS]
        self.adam = torch.optim.Adam(self.net, 1e-3)
        self.pace = Pace(0.7, decay)
        self.threshold = math.nan

    def logits(self, losses: Tensor, rows: int, time: float) -> Tensor:
        w1, b1, w2, b2, embeddings = self.net
        known = losses.detach()[:, None]
        cosines = torch.cos(math.pi * time * torch.arange(1, 6, dtype=torch.float64))
        features = torch.cat(
            [
                known,
                known - self.threshold,
                embeddings.repeat_interleave(rows, 0),
                cosines.expand(len(known), 5),
            ],
            dim=1,
        )
        return (torch.tanh(features @ w1.T + b1) @ w2.T + b2).squeeze(1)

    def learn(self, k: int, validation: Batch, time: float) -> None:
        align = torch.autograd.grad(losses_at(self.theta, validation).mean(), self.theta)
        losses = losses_at(self.theta, joined([self.run.asides[name].at(k) for name in NAMES]))
        wanted = []
        for one in losses:
            gradient = torch.autograd.grad(one, self.theta, retain_graph=True)
            wanted.append(float(sum((g * a).sum() for g, a in zip(gradient, align, strict=True)) > 0))
        assert 0 < sum(wanted) < len(wanted)
        target = torch.tensor(wanted, dtype=torch.float64)
        for _ in range(3):
            v = torch.sigmoid(self.logits(losses, self.run.probe_rows, time))
            entropy = -(target * v.log() + (1 - target) * (1 - v).log()).mean()
            self.adam.zero_grad()
            entropy.backward(inputs=self.net)
            self.adam.step()


@pytest.mark.parametrize("horizon", [1, 3])
def test_a_network_learns_which_rows_help(horizon: int) -> None:
    signal = LearnedRowCurriculum(steps=9, burn_in=0.2, decay=0.8, network_steps=3, seed=4)
    run = Run(signal, horizon=horizon, budget=9, probe_rows=5)
    literal = Literal(run, 9, 0.8)
    for k in range(9):
        batch, _ = run.batch(k)
        losses = losses_at(literal.theta, batch)
        literal.threshold = literal.pace.see(losses.detach().numpy())
        v = torch.ones(12) if k < 2 else torch.sigmoid(literal.logits(losses, 4, k / 9)).detach()
        loss = (v * losses).mean()
        literal.theta = stepped(literal.theta, loss)
        run.step()
        assert run.seen[-1] == pytest.approx(loss.item(), abs=1e-9)
        np.testing.assert_allclose(run.vector, flat(literal.theta), atol=1e-9)
        if k % horizon == horizon - 1:
            literal.learn(k // horizon, run.validation.at(k // horizon), (k + 1) / 9)
            state = run.signal.state()[1]
            for part, own in zip(PARTS, literal.net, strict=True):
                torch.testing.assert_close(state[f"network.{part}"], own.detach(), rtol=0, atol=1e-9)
    assert float(literal.net[4].detach().abs().min()) > 0


@pytest.mark.parametrize("learned", [False, True])
def test_permuted_and_duplicate_domains(learned: bool) -> None:
    def final(**settings: Any) -> dict[str, float]:
        signal: Any = GivenRowCurriculum("domains", curriculum="linear", steps=6, burn_in=0.0)
        if learned:
            signal = LearnedRowCurriculum("domains", steps=6, burn_in=0.0, learning_rate=0.1, network_steps=1)
        return Run(signal, SoftmaxWeights(), horizon=2, **settings).go(6).mixer.weights.last

    plain = final()
    assert max(plain.values()) > 0.34
    assert final(names=("noisy", "clean", "turned")) == pytest.approx(plain, rel=1e-6)
    doubled = final(
        names=("clean", "turned", "noisy", "copy"),
        rows=(4, 4, 4, 4),
        sources={"copy": "turned"},
        weights=[2, 1, 2, 1],
    )
    assert doubled["turned"] == pytest.approx(doubled["copy"], rel=1e-6)
    assert doubled["turned"] + doubled["copy"] == pytest.approx(plain["turned"], rel=1e-6)
    assert doubled["clean"] == pytest.approx(plain["clean"], rel=1e-6)


# ----------------------------------------------------------------------------------------- around it

KINDS: dict[str, Any] = {
    "given": lambda level: GivenRowCurriculum(level, curriculum="linear", steps=8, burn_in=0.2),
    "learned": lambda level: LearnedRowCurriculum(level, steps=8, burn_in=0.2),
}


@pytest.mark.parametrize("level", ["rows", "domains"])
@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_for_bit(kind: str, level: Any, stop: int) -> None:
    def fresh() -> Run:
        return Run(KINDS[kind](level), SoftmaxWeights() if level == "domains" else 1.0, horizon=3)

    whole = fresh().go(8)
    first, second = fresh().go(stop), fresh().go(2)
    second.take_over(first)
    second.go(8 - stop)
    np.testing.assert_array_equal(second.vector, whole.vector)
    np.testing.assert_array_equal(second.mixer.weights.history, whole.mixer.weights.history)
    assert second.mixer.rounds == whole.mixer.rounds
    values, tensors = whole.signal.state()
    assert second.signal.state()[0] == values
    for name, tensor in tensors.items():
        assert torch.equal(second.signal.state()[1][name], tensor), name


def test_state_within_step_drops_that_step() -> None:
    run, other = (Run(KINDS["given"]("rows"), horizon=3) for _ in range(2))
    run.go(4)
    other.go(4)
    batch, labels = run.batch(4)
    with run.mixer.batch(labels) as rows:
        rows.weighted_loss(row_losses(run.model, batch), data=batch).backward()
    state = run.mixer.state_dict(forget_step=True)
    run.mixer.load_state_dict(state)
    run.optimizer.zero_grad()
    run.go(4)
    other.go(4)
    np.testing.assert_array_equal(run.vector, other.vector)
    (values, tensors), (expected, wanted) = run.signal.state(), other.signal.state()
    assert values == expected
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name


def test_compute_matches_planned_cost() -> None:
    run = Run(LearnedRowCurriculum(steps=4), horizon=2, rows=(2, 2, 2), probe_rows=2).go(4)
    extra = methods.find("mentornet-dd").extra(task("mentornet-dd"))
    assert run.probes.spent == pytest.approx(6 * (extra.before + 4 * extra.per_step + 2 * extra.per_round))
    assert run.signal.nbytes == 3 * (20 * 9 + 20 + 20 + 1 + 6) * 8 + 5 * 4
    given = methods.find("mentornet").extra(task("mentornet"))
    assert (given.before, given.per_step, given.per_round) == (0, 0, 0)


def task(name: str, **settings: Any) -> MethodContext:
    options = methods.find(name).options.model_validate(settings)
    return MethodContext(
        domains=NAMES,
        rows=dict.fromkeys(NAMES, 100),
        batch_rows=12,
        steps=50,
        seed=3,
        warmup=10,
        options=options,
    )


def test_recipes() -> None:
    given = methods.find("mentornet")
    made = given.recipe(task("mentornet", curriculum="linear"))
    assert repr(made.signal) == (
        "GivenRowCurriculum(level='rows', normalize=False, steps=40, percentile=0.7, decay=0.9, burn_in=0.2, "
        "curriculum='linear')"
    )
    assert isinstance(made.update, MirrorDescent)
    assert not made.signal.requirements.validation
    assert not given.needs.validation
    learned = methods.find("mentornet-dd")
    made = learned.recipe(task("mentornet-dd", level="domains"))
    assert repr(made.signal) == (
        "LearnedRowCurriculum(level='domains', normalize=False, steps=40, percentile=0.7, decay=0.9, burn_in=0.2, "
        "hidden=20, learning_rate=0.001, seed=3, network_steps=50)"
    )
    assert isinstance(made.update, SoftmaxWeights)
    assert learned.needs.validation
    assert made.signal.requirements.validation


def test_invalid_arguments_raise() -> None:
    for settings, named in [
        ({"steps": 0}, "steps must be"),
        ({"steps": 5, "percentile": 1.5}, "got 1.5"),
        ({"steps": 5, "decay": 1.0}, "decay in"),
        ({"steps": 5, "curriculum": "focal"}, "'self-paced' or 'linear', got 'focal'"),
    ]:
        with pytest.raises(ValueError, match=named):
            GivenRowCurriculum(**settings)
    with pytest.raises(ValueError, match="positive learning rate"):
        LearnedRowCurriculum(steps=5, learning_rate=0.0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    without = Probes(model, mean_loss, {name: (lambda: None) for name in NAMES})
    for probes in (None, without):
        with pytest.raises(ValueError, match=r"probes=Probes.*row_losses=\.\.\.\)"):
            mixwell.Mixer(
                model, optimizer, NAMES, horizon=1, signal=LearnedRowCurriculum(steps=5), probes=probes
            )
    run = Run(LearnedRowCurriculum(steps=5))
    run.asides["noisy"].at = lambda k: (torch.full((2, 3), torch.nan).double(), torch.zeros(2).double())  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="of 'noisy', computed outside of the training step"):
        run.step()
