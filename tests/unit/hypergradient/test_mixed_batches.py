"""Traces from mixed batches are those of one batch per domain."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from helpers.mixed_batches import (
    DOMAINS,
    EXACT,
    LABELS,
    PROBLEMS,
    SHUFFLED,
    SignalModel,
    TokenModel,
    draw_steps,
    flat,
    last_scores,
    mean_loss,
    new_mixer,
    row_losses,
    signals,
    tokens,
    train_by_domain,
    train_mixed,
    train_steps,
    validate,
)
from helpers.toy_problems import labeled_batch
from mixwell import Hypergradient, Mixer, ProjectedTraces

pytestmark = pytest.mark.filterwarnings("error")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("labels", [LABELS, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    "make_traces", [lambda: ProjectedTraces(EXACT), mixwell.DenseTraces], ids=["projected", "dense"]
)
def test_mixed_batch_matches_one_batch_per_domain(
    make_traces, problem: str, kind: str, labels: Tensor
) -> None:
    make, draw = PROBLEMS[problem]
    model = make().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(draw, 4)
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    left = train_by_domain(
        model, OPTIMIZERS[kind](model.parameters()), steps, validation, labels, weights=weights
    )
    optimizer = OPTIMIZERS[kind](twin.parameters())
    right = train_mixed(twin, optimizer, steps, validation, labels, make_traces(), weights=weights)
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_dense_adam_traces_from_mixed_batches() -> None:
    model = TokenModel().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 5)
    left = train_by_domain(model, torch.optim.AdamW(model.parameters(), lr=0.01), steps, validation, SHUFFLED)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    right = train_mixed(twin, optimizer, steps, validation, SHUFFLED, mixwell.DenseTraces())
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-6)


def test_linear_layers_with_autocast_and_frozen_parameters() -> None:
    """Wider than one block of the fused linear layer; under autocast gradients are of that precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 400), nn.Tanh(), nn.Linear(400, 3))
    model[2].bias.requires_grad_(False)
    steps = [(torch.randn(6, 700), torch.randint(0, 3, (6,))) for _ in range(3)]
    results = []
    for feed, precision in (
        (train_by_domain, None),
        (train_mixed, None),
        (train_by_domain, torch.bfloat16),
        (train_mixed, torch.bfloat16),
    ):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
        options = {"traces": mixwell.DenseTraces()} if feed is train_mixed else {}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            results.append(last_scores(feed(twin, optimizer, steps, steps[0], LABELS, **options)))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
    np.testing.assert_allclose(results[3], results[2], rtol=0.03, atol=0.01 * abs(results[2]).max())


def test_clipping_matches_step() -> None:
    """With the clipping factors of all steps known, the trace is ``sum_t eta d(c_t G_t)/dw_j`` (gamma = 0)."""
    model = SignalModel().double()
    steps, validation = draw_steps(signals, 3)
    start = copy.deepcopy(model.state_dict())
    mixer = Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=3,
        signal=Hypergradient(0.0, ProjectedTraces(EXACT), points=1),
        update=1.0,
        clip_norm=0.3,
    )
    train_steps(mixer, model, steps)
    validate(mixer, model, validation)

    def clipped(weights: Tensor, own: Tensor) -> Tensor:
        combined = weights @ own
        return combined * (0.3 / (combined.norm() + 1e-6)).clamp_max(1.0)

    model.load_state_dict(start)
    parameters = list(model.parameters())
    traces = torch.zeros(3, sum(p.numel() for p in parameters), dtype=torch.float64)
    for batch in steps:
        losses = row_losses(model, batch)
        own = [
            flat(torch.autograd.grad(losses[torch.eq(LABELS, j)].mean(), parameters, retain_graph=True))
            for j in range(3)
        ]
        combined = torch.stack(own).mean(dim=0)
        clip = min(1.0, 0.3 / (float(combined.norm()) + 1e-6))
        traces += 0.1 * torch.func.jacrev(clipped)(torch.full((3,), 1 / 3).double(), torch.stack(own)).t()
        with torch.no_grad():
            for p, g in zip(parameters, combined.split([p.numel() for p in parameters]), strict=True):
                p -= 0.1 * clip * g.view_as(p)
    wanted = flat(torch.autograd.grad(mean_loss(model, validation), parameters))
    np.testing.assert_allclose(last_scores(mixer), -(traces @ wanted).numpy(), rtol=1e-6)


def test_adam_preconditions_gradients() -> None:
    """``h_j = -<v, sum_t rate_t P_t g_jt>``, with gamma = 0 and no momentum; P_t is that of the step before."""
    model = SignalModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.9), weight_decay=0.0)
    steps, validation = draw_steps(signals, 4)
    signal = Hypergradient(0.0, ProjectedTraces(EXACT), points=1)
    mixer = Mixer(model, optimizer, DOMAINS, horizon=4, signal=signal, update=1.0)
    parameters = list(model.parameters())
    traces = torch.zeros(3, sum(p.numel() for p in parameters), dtype=torch.float64)
    for t, batch in enumerate(steps):
        losses = row_losses(model, batch)
        if t:  # the first step of Adam is lr times a sign, which has no derivative
            second = [optimizer.state[p]["exp_avg_sq"] / (1 - 0.9**t) for p in parameters]
            floors = [part.mean().sqrt() / 10 for part in second]
            roots = [torch.maximum(part.sqrt(), least) for part, least in zip(second, floors, strict=True)]
            precondition = 1 / (flat(roots) + 1e-8)
            for j in range(3):
                own = torch.autograd.grad(losses[torch.eq(LABELS, j)].mean(), parameters, retain_graph=True)
                traces[j] += 0.01 * precondition * flat(own)
        train_steps(mixer, model, [batch])
    wanted = flat(torch.autograd.grad(mean_loss(model, validation), parameters))
    validate(mixer, model, validation)
    np.testing.assert_allclose(last_scores(mixer), -(traces @ wanted).numpy(), rtol=1e-6)


def test_one_batch_per_domain_gives_same_result() -> None:
    model = TokenModel().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 3)
    left = train_by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=ProjectedTraces(3)),
    )
    right = train_mixed(
        twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, ProjectedTraces(3)
    )
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)


def test_micro_batches_with_step_counts() -> None:
    model = TokenModel().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 3)
    left = train_mixed(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)
    mixer = Mixer(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        DOMAINS,
        horizon=3,
        update=1.0,
        signal=Hypergradient(traces=ProjectedTraces(EXACT)),
    )
    for x, y in steps:
        for part in (slice(0, 3), slice(3, 6)):
            with mixer.batch(LABELS[part], expected_counts={"a": 2, "b": 1, "c": 3}) as batch:
                batch.weighted_loss(row_losses(twin, (x[part], y[part]))).backward()
        mixer.step()
        if mixer.validation_due:
            validate(mixer, twin, validation)
    np.testing.assert_allclose(last_scores(mixer), last_scores(left), rtol=1e-9)
    assert mixer.rounds[0].losses == pytest.approx(left.rounds[0].losses)


def test_rows_drawn_by_weights_give_plain_mean() -> None:
    model = SignalModel().double()
    mixer = new_mixer(model, weights={"a": 0.5, "b": 0.25, "c": 0.25})
    batch = signals(6)
    expected = {name: 6 * weight for name, weight in mixer.weights.last.items()}
    with mixer.batch(["a", "a", "a", "a", "b", "a"], expected_counts=expected) as rows:
        losses = row_losses(model, batch)
        loss = rows.weighted_loss(losses)
        assert loss.item() == pytest.approx(losses.mean().item())
        loss.backward()
    mixer.step()


def test_losses_are_divided_by_domain_probability() -> None:
    model = SignalModel().double()
    mixer = new_mixer(model)
    with mixer.batch(labeled_batch("aab", DOMAINS, {"c": 0.25})) as rows:
        losses = row_losses(model, signals(3))
        loss = rows.weighted_loss(losses)
        assert loss.item() == pytest.approx((losses[:2].mean() / 3 + losses[2] / 3).item())
        loss.backward()
    mixer.step()
    with mixer.batch(labeled_batch("abcc", DOMAINS, {"c": 0.25})) as rows:
        losses = row_losses(model, signals(4))
        wanted = losses[0] / 3 + losses[1] / 3 + 4 * losses[2:].mean() / 3
        loss = rows.weighted_loss(losses)
        assert loss.item() == pytest.approx(wanted.item())
        loss.backward()


def test_frozen_parameters_and_warmup() -> None:
    model = TokenModel().double()
    model.shared.weight.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 4)
    results = []
    for one, feed in ((model, "domain"), (twin, "batch")):
        trained = [p for p in one.parameters() if p.requires_grad]
        signal = Hypergradient(traces=ProjectedTraces(EXACT) if feed == "batch" else None)
        mixer = Mixer(
            one, torch.optim.SGD(trained, lr=0.1), DOMAINS, horizon=3, signal=signal, update=1.0, warmup=1
        )
        for x, y in steps:
            if feed == "batch":
                train_steps(mixer, one, [(x, y)], validation)
                continue
            for place, name in enumerate(DOMAINS):
                with mixer.domain(name):
                    mean_loss(one, (x[torch.eq(LABELS, place)], y[torch.eq(LABELS, place)])).backward()
            mixer.step()
            if mixer.validation_due:
                validate(mixer, one, validation)
        results.append(last_scores(mixer))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)


def test_subset_of_parameters() -> None:
    model = TokenModel().double()
    twin = copy.deepcopy(model)
    steps, validation = draw_steps(tokens, 3)
    select = ["shared.*", "second.weight"]
    left = train_by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=mixwell.DenseTraces(only=select)),
    )
    right = train_mixed(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        ProjectedTraces(EXACT, only=select),
    )
    np.testing.assert_allclose(last_scores(right), last_scores(left), rtol=1e-9)


@pytest.mark.parametrize(
    ("horizon", "rounds", "stop"), [(5, 1, 3), (5, 1, 4), (12, 0, 1), (12, 0, 5), (12, 0, 9)]
)
def test_resume_in_mid_round_is_bit_for_bit(tmp_path, horizon, rounds, stop) -> None:
    steps, validation = draw_steps(tokens, horizon)

    def start() -> tuple[nn.Module, Mixer]:
        torch.manual_seed(0)
        model = TokenModel()
        return model, new_mixer(model, traces=ProjectedTraces(4), horizon=horizon, points=8)

    def whole_rounds(count: int) -> tuple[nn.Module, Mixer]:
        model, mixer = start()
        for _ in range(count):
            train_steps(mixer, model, steps, validation)
        return model, mixer

    _, undisturbed = whole_rounds(rounds + 1)
    first, stopped = whole_rounds(rounds)
    train_steps(stopped, first, steps[:stop], validation)
    stopped.save(tmp_path / "mixer.safetensors")
    second, resumed = start()
    second.load_state_dict(first.state_dict())
    resumed.load(tmp_path / "mixer.safetensors")
    train_steps(resumed, second, steps[stop:], validation)
    assert resumed.rounds[-1].points > 1
    assert resumed.rounds == undisturbed.rounds


def test_fixed_weights_from_mixed_batches() -> None:
    model = TokenModel().double()
    mixer = Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=2,
        signal=mixwell.ConstantWeights(),
        update=1.0,
    )
    steps, _ = draw_steps(tokens, 2)
    train_steps(mixer, model, steps)
    assert len(mixer.rounds) == 1
    assert mixer.nbytes == 0
