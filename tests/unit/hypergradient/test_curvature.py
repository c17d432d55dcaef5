"""Measured curvature against the true one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mixwell
from helpers.toy_problems import Point, mse, names, regression_batches, train, two_layer
from mixwell.hypergradient.curvature import RoundStart
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import StepResponse, _inverse_root
from mixwell.reference.quadratics import Quadratic


def measured(shape, *, scale=None, rate=0.01, **settings):
    quadratic = Quadratic.random(domains=3, dimension=5, seed=0)
    model = Point(torch.randn(5, dtype=torch.float64))
    problem = quadratic.problem()

    def probe(name: str):
        return lambda: problem.losses(model.theta, 0)[int(name[1])]

    curvature = mixwell.MeasuredCurvature(probe, shape, **settings)
    curvature.bind(Parameters(("theta",), (model.theta,), (0,)))
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    validation = torch.randn(5, dtype=torch.float64)
    before = model.theta.detach().clone()
    response = StepResponse(rate=rate, preconditioner=None if scale is None else lambda: scale)
    curvature.begin_round(RoundStart(names(3), weights.tolist(), [validation], lambda: [response]))
    assert torch.equal(model.theta, before)
    assert model.theta.grad is None
    return curvature, quadratic.hessian(weights), validation


def test_rayleigh_quotient_of_the_validation_gradient() -> None:
    curvature, hessian, v = measured("isotropic")
    assert curvature.summary() == pytest.approx(float(v @ hessian @ v / (v @ v)), rel=1e-6)


def test_rayleigh_quotient_in_the_optimizers_geometry() -> None:
    scale = torch.tensor([1.0, 4.0, 0.5, 2.0, 10.0], dtype=torch.float64)
    curvature, hessian, v = measured("isotropic", scale=scale)
    u = scale * v
    assert curvature.summary() == pytest.approx(float(u @ hessian @ u / (v @ u)), rel=1e-6)


def test_no_step_may_more_than_cancel_a_trace() -> None:
    curvature, _, _ = measured("isotropic", rate=2.0)
    assert curvature.summary() == 0.5


def test_hutchinson_diagonal_is_unbiased() -> None:
    curvature, hessian, _ = measured("diagonal", samples=3000)
    (diagonal,) = curvature.coefficients()
    assert isinstance(diagonal, torch.Tensor)
    # standard error of an entry: sqrt(2 sum of squares off the diagonal / samples)
    spread = ((hessian.square().sum(1) - hessian.diagonal().square()) / 3000).sqrt()
    assert bool(((diagonal - hessian.diagonal()).abs() < 4 * spread + 1e-6).all())


def test_per_tensor_blocks() -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.randn(2), "b": torch.randn(3)}).double()
    curvature = mixwell.MeasuredCurvature(
        lambda _: lambda: 2 * model["a"].square().sum() + 5 * model["b"].square().sum(), "per-tensor"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    curvature.bind(Parameters.of(model, optimizer))
    gradients: list = [torch.randn_like(p) for p in model.parameters()]
    curvature.begin_round(
        RoundStart(["x"], [1.0], gradients, lambda: [StepResponse(0.01), StepResponse(0.01)])
    )
    assert curvature.coefficients() == pytest.approx([4.0, 10.0], rel=1e-6)


def test_measuring_leaves_the_run_as_it_was() -> None:
    """Dropout, running statistics and the random stream: a run that measures trains the same model."""
    batches, validation = regression_batches(0, steps=8)

    def run(measure: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)
        ).double()
        curvature = (
            mixwell.MeasuredCurvature(lambda name: lambda: mse(model, batches[0][name])) if measure else 0.01
        )
        mixer = mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            names(3),
            horizon=4,
            # A tiny step, so that both runs have the same weights in the second round.
            update=1e-14,
            signal=mixwell.Hypergradient(curvature),
        )
        train(mixer, model, batches, validation)
        return model.state_dict(), [r.measured["curvature"] for r in mixer.rounds]

    (state, gammas), (plain, fixed) = run(True), run(False)
    assert fixed == [0.01, 0.01]
    assert gammas[0] == 0.01
    assert gammas[1] != 0.01
    for name, value in state.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-10, atol=1e-12)


def test_a_broken_probe_is_named() -> None:
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=2)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    curvature = mixwell.MeasuredCurvature(lambda name: lambda: nan * mse(model, batches[0][name]))
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        names(3),
        horizon=2,
        signal=mixwell.Hypergradient(curvature),
    )
    with pytest.raises(FloatingPointError, match="non-finite training loss of 'd0' while measuring"):
        train(mixer, model, batches, validation)


def test_curvature_with_momentum_does_not_blow_up_a_stable_run() -> None:
    """Folded momentum makes ``1 - lr/(1-mu) gamma`` as low as -4 here; the trace must fade, not explode."""
    model = Point(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=30, signal=mixwell.Hypergradient(5.0))
    for _ in range(30):
        for index in range(2):
            with mixer.domain(f"d{index}"):
                (2.5 * (model.theta - index).square().sum()).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model.theta.sum().backward()
    assert max(abs(s) for s in mixer.rounds[-1].scores.values()) < 10


def test_an_unseen_row_does_not_take_over_the_rayleigh_quotient() -> None:
    """An embedding row that only validation has: Adam's v is zero there."""
    second = torch.full((10, 4), 0.25, dtype=torch.float64)
    second[7] = 0.0
    scale = _inverse_root(second, 1e-8)
    assert float(scale[7].max()) <= 10 * float(scale[0].max()) * (1 + 1e-6)
