"""Compressed traces: what they cost, and that they are unbiased."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mixwell
from helpers.toy_problems import Point, mse, names, regression_batches, train, two_layer
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import SgdResponse
from mixwell.hypergradient.traces.base import StepModel
from mixwell.hypergradient.traces.dense import round_stochastically
from mixwell.hypergradient.traces.sketched import SketchedTraces
from mixwell.reference.comparison import relative_error


def sketches(
    size: int, seeds: int, length: int = 600
) -> tuple[np.ndarray, float, torch.Tensor, torch.Tensor]:
    """Estimates of <x, y> by many seeds, and the true value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, length // 30, generator=generator, dtype=torch.float64)
    x[:, 3] *= 8  # one column carries most of the energy, as gradients of matrices do
    y = torch.randn(30, length // 30, generator=generator, dtype=torch.float64) + 0.3 * x
    parameter = torch.nn.Parameter(torch.zeros_like(x))
    parameters = Parameters(("x",), (parameter,), (0,))
    optimizer = SgdResponse(torch.optim.SGD([parameter], lr=0.1), parameters)
    step = StepModel(optimizer, [optimizer.response(0, remaining=1)], [0.0])
    found = []
    for seed in range(seeds):
        traces = SketchedTraces(size, seed=seed)
        traces.allocate(parameters, 1, step)
        (stored,) = traces._stored.values()
        traces._sketch_into({0: stored[0]}, [x], [1.0])
        found.append(traces.dot([y])[0])
    return np.array(found), float((x * y).sum()), x, y


def test_sketch_is_unbiased_with_the_predicted_variance() -> None:
    found, truth, x, y = sketches(size=61, seeds=800)
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - truth) < 4 * error
    assert found.var() < 2 * float(x.square().sum() * y.square().sum()) / 61


def test_sketch_of_full_size_is_exact() -> None:
    found, truth, *_ = sketches(size=601, seeds=3)
    np.testing.assert_allclose(found, truth, rtol=1e-12)


def scores_of(signal: mixwell.Signal, *, steps: int = 12, kind=torch.optim.SGD, **options) -> np.ndarray:
    model = two_layer(0, dtype=torch.float32)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    mixer = mixwell.Mixer(model, optimizer, names(3), horizon=steps, signal=signal)
    batches, validation = regression_batches(0, steps=steps, dtype=torch.float32)
    train(mixer, model, batches, validation)
    return np.array(list(mixer.rounds[0].scores.values()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_bfloat16_is_close_to_dense_in_half_the_memory(kind) -> None:
    dense, compressed = mixwell.DenseTraces(), mixwell.DenseTraces(dtype=torch.bfloat16)
    reference = scores_of(mixwell.Hypergradient(traces=dense), kind=kind)
    estimate = scores_of(mixwell.Hypergradient(traces=compressed), kind=kind)
    np.testing.assert_allclose(estimate, reference, rtol=0.01)
    assert not np.array_equal(estimate, reference)
    assert compressed.nbytes * 2 == dense.nbytes


def test_stochastic_rounding_is_unbiased_and_small_terms_count() -> None:
    value = torch.full((20_000,), 1.0 + 1 / 512)  # a quarter of the way between two bfloat16 numbers
    rounded = round_stochastically(value, torch.Generator().manual_seed(0)).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert rounded.mean().item() == pytest.approx(1 + 1 / 512, abs=1e-4)
    model = Point(torch.zeros(4000))
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        ["a"],
        horizon=1000,
        signal=mixwell.Hypergradient(0.0, mixwell.DenseTraces(dtype=torch.bfloat16), points=1, trace_every=1),
    )
    for _ in range(1000):
        with mixer.domain("a"):
            model.theta.sum().backward()
        mixer.step()
    with mixer.validation():
        model.theta.mean().backward()
    # A sum of 1000 equal terms; rounded to nearest it would stop at 256 of them.
    assert mixer.rounds[-1].scores["a"] == pytest.approx(-1.0, rel=0.01)


def test_sketch_error_shrinks_with_its_size() -> None:
    dense = scores_of(mixwell.Hypergradient(points=1))
    errors = []
    for size in (8, 128):
        kinds = [mixwell.SketchedTraces(size, seed=seed) for seed in range(20)]
        found = [scores_of(mixwell.Hypergradient(traces=traces, points=1)) for traces in kinds]
        errors.append(float(np.sqrt(np.mean([relative_error(one, dense) ** 2 for one in found]))))
    # sixteen times the size: a fourth of the error
    assert errors[1] < errors[0] / 2


def test_memory_of_sketched_and_dense_traces() -> None:
    sketched, dense = mixwell.SketchedTraces(64), mixwell.DenseTraces()
    for traces in (sketched, dense):
        scores_of(mixwell.Hypergradient(traces=traces), steps=1)
    assert dense.nbytes == 3 * 180 * 4
    assert sketched.nbytes == 3 * 61 * 4 + 180


def test_subset_counts_only_chosen_parameters() -> None:
    chosen = scores_of(mixwell.Hypergradient(traces=mixwell.DenseTraces(only=["2.*"])))
    rest = scores_of(
        mixwell.Hypergradient(traces=mixwell.DenseTraces(only=lambda name: name.startswith("0.")))
    )
    whole = scores_of(mixwell.Hypergradient())
    np.testing.assert_allclose(chosen + rest, whole, rtol=1e-5)
    assert not np.allclose(chosen, whole)


def test_groups_with_different_decay_are_sketched_separately() -> None:
    """Weight decay on matrices only, as usual with AdamW; a sketch of full size must equal dense traces."""

    def scores(signal: mixwell.Signal) -> np.ndarray:
        model = two_layer(0, dtype=torch.float32)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1.0},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        mixer = mixwell.Mixer(model, torch.optim.AdamW(groups, lr=0.05), names(3), horizon=10, signal=signal)
        batches, validation = regression_batches(0, steps=10, dtype=torch.float32)
        train(mixer, model, batches, validation)
        return np.array(list(mixer.rounds[0].scores.values()))

    dense = scores(mixwell.Hypergradient())
    np.testing.assert_allclose(
        scores(mixwell.Hypergradient(traces=mixwell.SketchedTraces(2000))), dense, rtol=1e-4
    )


def test_bfloat16_decays_without_bias() -> None:
    """Adam's weight decay acts on a trace element by element; rounded to nearest, .999 would never move it."""

    def score(traces: mixwell.Traces) -> float:
        model = Point(torch.zeros(4000))
        # A second moment of one, which stays.
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 1.0 - 1e-9), weight_decay=1.0)
        ones = torch.ones_like(model.theta)
        optimizer.state[model.theta] = {
            "step": torch.tensor(1e12),
            "exp_avg": torch.zeros_like(ones),
            "exp_avg_sq": ones,
        }
        mixer = mixwell.Mixer(
            model,
            optimizer,
            ["a"],
            horizon=1000,
            signal=mixwell.Hypergradient(0.0, traces, points=1, trace_every=1),
        )
        for t in range(1000):
            with mixer.domain("a"):
                (model.theta * float(t == 0)).sum().backward()
            mixer.step()
        with mixer.validation():
            model.theta.mean().backward()
        return mixer.rounds[-1].scores["a"]

    dense = score(mixwell.DenseTraces())
    assert dense == pytest.approx(-1e-3 * 0.999**999, rel=1e-3)
    assert score(mixwell.DenseTraces(dtype=torch.bfloat16)) == pytest.approx(dense, rel=0.02)


def test_parameter_without_update_keeps_trace() -> None:
    def score(traces: mixwell.Traces) -> float:
        model = torch.nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        signal = mixwell.Hypergradient(0.0, traces, points=1)
        mixer = mixwell.Mixer(model, optimizer, ["x"], horizon=10, signal=signal)
        for t in range(10):
            with mixer.domain("x"):
                (model["a"] if t == 0 else model["b"]).sum().backward()
            mixer.step()
        with mixer.validation():
            model["a"].sum().backward()
        return mixer.rounds[-1].scores["x"]

    assert score(mixwell.DenseTraces()) == pytest.approx(-0.2)
    assert score(mixwell.ForwardModeTraces()) == pytest.approx(-0.2)


def test_a_sketch_with_adamw_and_a_frozen_parameter() -> None:
    def scores(traces: mixwell.Traces) -> np.ndarray:
        model = two_layer(0, dtype=torch.float32)
        next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mixer = mixwell.Mixer(
            model, optimizer, names(3), horizon=8, signal=mixwell.Hypergradient(traces=traces)
        )
        batches, validation = regression_batches(0, steps=8, dtype=torch.float32)
        train(mixer, model, batches, validation)
        return np.array(list(mixer.rounds[0].scores.values()))

    assert relative_error(scores(mixwell.SketchedTraces(2000)), scores(mixwell.DenseTraces())) < 1e-4


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("traces", [mixwell.DenseTraces, lambda: mixwell.SketchedTraces(2000)])
def test_first_step_of_round_has_own_clipping_factor(warmup: int, traces) -> None:
    """With one step to a round, first-order traces know the factor and its derivative exactly."""
    batches, validation = regression_batches(0, steps=5)
    model = two_layer(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixer = mixwell.Mixer(
        model,
        optimizer,
        names(3),
        horizon=1,
        warmup=warmup,
        clip_norm=0.01,
        signal=mixwell.Hypergradient(traces=traces()),
    )
    train(mixer, model, batches[:warmup], validation)
    reference = two_layer(0)
    reference.load_state_dict(model.state_dict())
    train(mixer, model, batches[warmup : warmup + 1], validation)
    params = list(reference.parameters())
    gradients = [torch.autograd.grad(mse(reference, b), params) for b in batches[warmup].values()]
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    total = [
        sum(w * g for w, g in zip(weights, parts, strict=True)) for parts in zip(*gradients, strict=True)
    ]
    clip = 0.01 / (torch.stack([g.square().sum() for g in total]).sum().sqrt() + 1e-6)
    target = torch.autograd.grad(mse(model, validation), list(model.parameters()))
    moved = torch.stack([(-0.05 * clip * g * t).sum() for g, t in zip(total, target, strict=True)]).sum()
    (expected,) = torch.autograd.grad(moved, weights)
    assert list(mixer.rounds[0].scores.values()) == pytest.approx(expected.tolist(), rel=1e-6)
