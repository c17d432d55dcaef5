"""The same hypergradients by JAX, another automatic differentiation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mixwell
from helpers.toy_problems import mse, quadratic_round, regression_batches, two_layer
from mixwell.reference import unroll
from mixwell.reference.quadratics import Quadratic

jax = pytest.importorskip("jax", reason="JAX is not installed; `make peers` installs it")
pytestmark = pytest.mark.peers

ETA, T = 0.05, 10


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", range(3))
def test_quadratic(seed: int) -> None:
    quadratic = Quadratic.random(domains=4, dimension=6, seed=seed)
    theta = torch.randn(6, dtype=torch.float64)
    w = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    a, c = quadratic.hessians.numpy(), quadratic.centers.numpy()
    av, cv = quadratic.validation_hessian.numpy(), quadratic.validation_center.numpy()

    def validation(weights):
        x = jax.numpy.asarray(theta.numpy())
        for _ in range(T):
            x = x - ETA * jax.numpy.einsum("m,mij,mj->i", weights, a, x - c)
        return (x - cv) @ av @ (x - cv) / 2

    theirs = np.asarray(jax.grad(validation)(jax.numpy.asarray(w.numpy())))
    closed = quadratic.unrolled(theta, w, learning_rate=ETA, horizon=T).numpy()
    np.testing.assert_allclose(closed, theirs, rtol=1e-9)
    signal = mixwell.Hypergradient(mixwell.ExactCurvature(), points=1)
    mixer = quadratic_round(quadratic, theta, w, learning_rate=ETA, horizon=T, signal=signal)
    np.testing.assert_allclose(mixer, theirs, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_two_layer_network(seed: int) -> None:
    model = two_layer(seed)
    batches, validation = regression_batches(seed, steps=T)
    problem, theta = unroll.problem_from_model(model, mse, batches, validation)
    w = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    start = [p.detach().numpy() for p in model.parameters()]

    def loss(params, batch):
        x, y = (t.numpy() for t in batch)
        hidden = jax.numpy.tanh(x @ params[0].T + params[1])
        return jax.numpy.mean((hidden @ params[2].T + params[3] - y) ** 2)

    def final(weights):
        params = [jax.numpy.asarray(p) for p in start]
        for step in batches:
            gradient = jax.grad(
                lambda p, s=step: sum(weights[j] * loss(p, b) for j, b in enumerate(s.values()))
            )(params)
            params = [p - ETA * g for p, g in zip(params, gradient, strict=True)]
        return loss(params, validation)

    theirs = np.asarray(jax.grad(final)(jax.numpy.asarray(w.numpy())))
    for reference in (unroll.reverse_unroll, unroll.forward_unroll):
        ours = reference(problem, theta, w, learning_rate=ETA, horizon=T).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
