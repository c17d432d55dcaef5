"""The same hypergradients by TorchOpt's differentiable optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mixwell
from helpers.toy_problems import mse, regression_batches, two_layer
from mixwell.reference import unroll
from mixwell.reference.fidelity import measure_fidelity

torchopt = pytest.importorskip("torchopt", reason="TorchOpt is not installed; `make peers` installs it")
pytestmark = pytest.mark.peers

WEIGHTS = [0.5, 0.2, 0.3]


def by_torchopt(make_optimizer, seed: int, horizon: int) -> np.ndarray:
    """Unroll with a meta-optimizer and differentiate the validation loss by the weights."""
    model = two_layer(seed)
    batches, validation = regression_batches(seed, steps=horizon)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64, requires_grad=True)
    optimizer = make_optimizer(model)
    for step in batches:
        optimizer.step(sum(w * mse(model, b) for w, b in zip(weights, step.values(), strict=True)))
    (gradient,) = torch.autograd.grad(mse(model, validation), weights)
    return gradient.numpy()


def by_mixwell(make_optimizer, seed: int, horizon: int) -> np.ndarray:
    model = two_layer(seed)
    batches, validation = regression_batches(seed, steps=horizon)
    return measure_fidelity(
        model,
        make_optimizer(model.parameters()),
        mse,
        batches,
        validation,
        signal=lambda: mixwell.Hypergradient(mixwell.ExactCurvature(), points=1),
        weights=WEIGHTS,
        difference=1e-5,
    ).estimate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float, seed: int) -> None:
    theirs = by_torchopt(lambda m: torchopt.MetaSGD(m, lr=0.05, momentum=momentum), seed, 8)
    ours = by_mixwell(lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum), seed, 8)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    if not momentum:
        model = two_layer(seed)
        batches, validation = regression_batches(seed, steps=8)
        problem, theta = unroll.problem_from_model(model, mse, batches, validation)
        w = torch.tensor(WEIGHTS, dtype=torch.float64)
        reverse = unroll.reverse_unroll(problem, theta, w, learning_rate=0.05, horizon=8)
        np.testing.assert_allclose(reverse.numpy(), theirs, rtol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_adam(seed: int) -> None:
    # A large eps, so that the first step is not a mere sign and both are well conditioned.
    theirs = by_torchopt(lambda m: torchopt.MetaAdam(m, lr=0.01, eps=1e-3), seed, 8)
    ours = by_mixwell(lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3), seed, 8)
    # TorchOpt takes 1 - beta2^t in float32, a relative error of up to 6e-5; differences of the real optimizer
    # agree with ours to 1e-6 (tests/unit/test_estimators.py).
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
