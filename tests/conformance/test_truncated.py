"""The hypergradient of a round's last steps against truncated back-propagation, and its recursion word by word."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mixwell
from helpers.toy_problems import mse, names, quadratic_round, regression_batches, train, two_layer
from mixwell import methods
from mixwell.hypergradient.traces import TracesConfig
from mixwell.hypergradient.traces.dense import DenseTracesConfig
from mixwell.hypergradient.traces.projected import ProjectedTracesConfig
from mixwell.reference import unroll
from mixwell.reference.quadratics import Quadratic

ETA, T = 0.05, 9


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def setting(seed: int) -> tuple[Quadratic, torch.Tensor, torch.Tensor]:
    quadratic = Quadratic.random(domains=4, dimension=7, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    theta = torch.randn(7, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, generator=generator, dtype=torch.float64) + 0.1
    return quadratic, theta, weights / weights.sum()


@pytest.mark.parametrize("window", [1, 4, T, 50])
def test_exact_products_match_truncated_backpropagation(window: int) -> None:
    for seed in range(3):
        quadratic, theta, w = setting(seed)
        signal = mixwell.Hypergradient(mixwell.ExactCurvature(), points=1, window=window)
        found = quadratic_round(quadratic, theta, w, learning_rate=ETA, horizon=T, signal=signal)
        reference = unroll.truncated_reverse(
            quadratic.problem(), theta, w, learning_rate=ETA, horizon=T, window=min(window, T)
        ).numpy()
        assert relative(found, reference) < 1e-10
        if window < T:
            all_steps = unroll.reverse_unroll(quadratic.problem(), theta, w, learning_rate=ETA, horizon=T)
            assert relative(found, all_steps.numpy()) > 0.01


@pytest.mark.parametrize("horizon", [1, T])
@pytest.mark.parametrize("window", [1, 3])
def test_isotropic_traces_match_recursion(window: int, horizon: int) -> None:
    """u_j <- (1 - eta gamma) u_j + g_j over the last steps, h_j = -eta <g_V, u_j>, in plain numpy."""
    quadratic, theta, w = setting(3)
    signal = mixwell.Hypergradient(2.0, points=1, window=window)
    found = quadratic_round(quadratic, theta, w, learning_rate=ETA, horizon=horizon, signal=signal)
    hessians, centers, point = quadratic.hessians.numpy(), quadratic.centers.numpy(), theta.numpy()
    u = np.zeros((4, 7))
    for t in range(horizon):
        g = np.array([hessians[j] @ (point - centers[j]) for j in range(4)])
        if horizon - t <= window:
            u = (1 - ETA * 2.0) * u + g
        point = point - ETA * w.numpy() @ g
    target = quadratic.validation_hessian.numpy() @ (point - quadratic.validation_center.numpy())
    assert relative(found, -ETA * u @ target) < 1e-10


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_other_optimizers(kind: str) -> None:
    """A window of all steps is no window; a shorter one is another number."""

    def scores(**window: int) -> np.ndarray:
        model = two_layer(0)
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            if kind == "momentum"
            else torch.optim.AdamW(model.parameters(), lr=3e-3)
        )
        mixer = mixwell.Mixer(
            model, optimizer, names(3), horizon=6, signal=mixwell.Hypergradient(**window), update=1.0
        )
        train(mixer, model, *regression_batches(0, steps=6))
        return np.array(list(mixer.rounds[0].scores.values()))

    np.testing.assert_array_equal(scores(window=6), scores())
    assert relative(scores(window=2), scores()) > 0.05


@pytest.mark.parametrize("traces", [mixwell.DenseTraces, mixwell.ProjectedTraces])
def test_mixed_batches_outside_window_are_not_captured(traces) -> None:
    model = two_layer(0)
    steps, validation = regression_batches(0, steps=12)
    signal = mixwell.Hypergradient(traces=traces(), window=2)
    captured, capture = [], signal.traces.capture
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixer = mixwell.Mixer(model, optimizer, names(3), horizon=6, signal=signal, update=1.0)
    apart_model = two_layer(0)
    apart = mixwell.Mixer(
        apart_model,
        torch.optim.SGD(apart_model.parameters(), lr=0.05),
        names(3),
        horizon=6,
        signal=mixwell.Hypergradient(window=2),
        update=1.0,
    )

    def counted(row_groups, weights):
        captured.append(mixer.steps_done)
        return capture(row_groups, weights)

    signal.traces.capture = counted
    labels = np.repeat(np.arange(3), 16)
    for step in steps:
        inputs, targets = (torch.cat([pair[i] for pair in step.values()]) for i in (0, 1))
        with mixer.batch(labels) as batch:
            batch.weighted_loss((model(inputs) - targets).square().mean(dim=1)).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                mse(model, validation).backward()
    train(apart, apart_model, steps, validation)
    assert captured == [4, 5, 10, 11]
    for a, b in zip(mixer.rounds, apart.rounds, strict=True):
        assert list(a.scores.values()) == pytest.approx(list(b.scores.values()), rel=1e-6)


def test_nonfinite_outside_window_is_detected() -> None:
    model = two_layer(0)
    steps, _ = regression_batches(0, steps=1)
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        names(3),
        horizon=6,
        signal=mixwell.Hypergradient(traces=mixwell.ProjectedTraces(), window=1),
        on_nonfinite="skip",
    )
    inputs, _ = (torch.cat([pair[i] for pair in steps[0].values()]) for i in (0, 1))
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mixer.batch(np.repeat(np.arange(3), 16)) as batch:
            out = model(inputs)
            # A finite loss whose gradient is not.
            batch.weighted_loss(out.square().mean(dim=1) + (out - out).sum(dim=1).sqrt()).backward()
        mixer.step()
    assert mixer.skipped == {"batch": 1}
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


@pytest.mark.parametrize("stop", [2, 4, 5, 7])
def test_resume_in_mid_round_is_bit_for_bit(stop: int, tmp_path: Path) -> None:
    steps, validation = regression_batches(1, steps=12)

    def build() -> tuple[nn.Module, mixwell.Mixer]:
        model = two_layer(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, mixwell.Mixer(
            model, optimizer, names(3), horizon=6, signal=mixwell.Hypergradient(window=3), clip_norm=0.3
        )

    model, whole = build()
    train(whole, model, steps, validation)
    first, mixer = build()
    train(mixer, first, steps[:stop], validation)
    mixer.save(tmp_path / "mixer")
    second, resumed = build()
    second.load_state_dict(first.state_dict())
    resumed.load(tmp_path / "mixer")
    train(resumed, second, steps[stop:], validation)
    np.testing.assert_array_equal(resumed.weights.history, whole.weights.history)
    assert resumed.rounds == whole.rounds


def test_recipe() -> None:
    method = methods.find("truncated")

    def made(traces: TracesConfig, **options) -> tuple[mixwell.Signal, methods.Extra]:
        task = methods.MethodContext(
            domains=("a", "b"),
            rows={"a": 5, "b": 5},
            batch_rows=4,
            steps=100,
            options=method.options.model_validate(options),
            horizon=5,
            curvature=0.5,
            traces=traces,
        )
        assert method.recipe(task).update is None
        return method.recipe(task).signal, method.extra(task)

    signal, extra = made(ProjectedTracesConfig(projection_rank=8))
    assert repr(signal).startswith("Hypergradient(IsotropicCurvature(0.5), ProjectedTraces(8")
    assert repr(signal).endswith("window=10)")
    assert extra == methods.Extra()
    signal, extra = made(DenseTracesConfig(), curvature="exact", window=3)
    assert repr(signal) == "Hypergradient(ExactCurvature(), ForwardModeTraces(), points=1, window=3)"
    assert extra.per_round == 2 * 2 * 3


def test_default_has_no_window_and_zero_raises() -> None:
    assert (
        repr(mixwell.Hypergradient())
        == "Hypergradient(IsotropicCurvature(0.01), DenseTraces(), points=8, span=0.5)"
    )
    with pytest.raises(ValueError, match="window must be at least 1 step, got 0"):
        mixwell.Hypergradient(window=0)
