"""The estimators against closed forms, each other and finite differences."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

import mixwell
from helpers.contract_tables import NOT_DIFFERENTIATED, OPTIMIZERS, UNKNOWN
from helpers.toy_problems import GivenCurvature, mse, quadratic_round, regression_batches, train, two_layer
from mixwell.reference import unroll
from mixwell.reference.comparison import tangent_cosine
from mixwell.reference.fidelity import measure_fidelity
from mixwell.reference.quadratics import Quadratic

ETA, T = 0.05, 12


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def setting(seed: int, domains: int = 4, dimension: int = 7):
    quadratic = Quadratic.random(domains=domains, dimension=dimension, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    theta = torch.randn(dimension, generator=generator, dtype=torch.float64)
    weights = torch.rand(domains, generator=generator, dtype=torch.float64) + 0.1
    return quadratic, theta, weights / weights.sum()


def run(quadratic: Quadratic, theta: torch.Tensor, w: torch.Tensor, horizon: int) -> float:
    end = unroll.descend(quadratic.problem(), theta, w, learning_rate=ETA, steps=horizon)
    return float(quadratic.problem().validation(end))


@pytest.mark.parametrize("seed", range(5))
def test_exact_curvature_equals_every_exact_reference(seed: int) -> None:
    quadratic, theta, w = setting(seed)
    closed = quadratic.unrolled(theta, w, learning_rate=ETA, horizon=T).numpy()
    mixer = quadratic_round(
        quadratic,
        theta,
        w,
        learning_rate=ETA,
        horizon=T,
        signal=mixwell.Hypergradient(mixwell.ExactCurvature(), points=1),
    )
    assert relative(mixer, closed) < 1e-9
    problem = quadratic.problem()
    for reference in (unroll.forward_unroll, unroll.reverse_unroll):
        assert relative(reference(problem, theta, w, learning_rate=ETA, horizon=T).numpy(), closed) < 1e-9
    eps = 1e-5
    differences = []
    for j in range(len(w)):
        step = torch.zeros_like(w)
        step[j] = eps
        difference = run(quadratic, theta, w + step, T) - run(quadratic, theta, w - step, T)
        differences.append(difference / (2 * eps))
    assert relative(np.array(differences), closed) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_unrolled_converges_to_implicit_at_the_predicted_rate(seed: int) -> None:
    quadratic, _, w = setting(seed)
    implicit = quadratic.implicit(w).numpy()
    star = quadratic.minimizer(w)
    mu = float(torch.linalg.eigvalsh(quadratic.hessian(w))[0])
    # Started at the minimizer the error is eta sum_{i>=T} <g_V, (I - eta H)^i g_j>: a mix of geometric
    # decays, of which the slowest, (1 - eta mu)^T, is left for large T.
    rate = 0.02
    short, long = (
        relative(quadratic.unrolled(star, w, learning_rate=rate, horizon=h).numpy(), implicit)
        for h in (180, 240)
    )
    assert np.log(long / short) / 60 == pytest.approx(np.log(1 - rate * mu), rel=0.1)
    far = quadratic.unrolled(star + 1, w, learning_rate=ETA, horizon=600).numpy()
    assert relative(far, implicit) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_implicit_references_agree_with_the_closed_form(seed: int) -> None:
    quadratic, _, w = setting(seed)
    star, problem, closed = quadratic.minimizer(w), quadratic.problem(), quadratic.implicit(w).numpy()
    assert relative(unroll.implicit_cg(problem, star, w).numpy(), closed) < 1e-8
    neumann = unroll.implicit_neumann(problem, star, w, learning_rate=ETA, terms=800).numpy()
    assert relative(neumann, closed) < 1e-9
    # T terms are T unrolled steps from the minimizer.
    short = unroll.implicit_neumann(problem, star, w, learning_rate=ETA, terms=7).numpy()
    assert relative(short, quadratic.unrolled(star, w, learning_rate=ETA, horizon=7).numpy()) < 1e-9


def test_conjugate_gradient_rejects_saddle() -> None:
    quadratic, theta, w = setting(0)
    saddle = Quadratic(-quadratic.hessians, quadratic.centers, quadratic.validation_hessian, theta + 1)
    with pytest.raises(ValueError, match="not positive definite"):
        unroll.implicit_cg(saddle.problem(), theta, w)


def test_truncated_reverse_uses_only_last_steps() -> None:
    quadratic, theta, w = setting(3)
    problem = quadratic.problem()
    late = unroll.descend(problem, theta, w, learning_rate=ETA, steps=8)
    window = unroll.truncated_reverse(problem, theta, w, learning_rate=ETA, horizon=12, window=4)
    assert relative(window.numpy(), quadratic.unrolled(late, w, learning_rate=ETA, horizon=4).numpy()) < 1e-9
    with pytest.raises(ValueError, match="window must be between 1 and the horizon of 12"):
        unroll.truncated_reverse(problem, theta, w, learning_rate=ETA, horizon=12, window=13)


def literal(quadratic: Quadratic, theta, w, horizon: int, shrink) -> np.ndarray:
    """Eq. 7 and 26 word by word; ``shrink(u)`` is ``(I - eta H) u``."""
    u = torch.zeros_like(quadratic.centers)
    for _ in range(horizon):
        g = torch.einsum("mij,mj->mi", quadratic.hessians, theta - quadratic.centers)
        u = shrink(u) + g
        theta = theta - ETA * w @ g
    target = quadratic.validation_hessian @ (theta - quadratic.validation_center)
    return (-ETA * u @ target).numpy()


@pytest.mark.parametrize("gamma", [0.0, 0.01, 3.0, 19.0, 25.0])
def test_isotropic_traces_match_recursion(gamma: float) -> None:
    quadratic, theta, w = setting(1)
    got = quadratic_round(
        quadratic, theta, w, learning_rate=ETA, horizon=40, signal=mixwell.Hypergradient(gamma, points=1)
    )
    assert relative(got, literal(quadratic, theta, w, 40, lambda u: (1 - ETA * gamma) * u)) < 1e-9


@pytest.mark.parametrize("forward_mode", [False, True])
def test_given_curvature_matches_recursion(forward_mode: bool) -> None:
    quadratic, theta, w = setting(2)
    traces = mixwell.ForwardModeTraces() if forward_mode else mixwell.DenseTraces()
    got = quadratic_round(
        quadratic,
        theta,
        w,
        learning_rate=ETA,
        horizon=T,
        signal=mixwell.Hypergradient(GivenCurvature({"theta": 2.0}), traces, points=1),
    )
    assert relative(got, literal(quadratic, theta, w, T, lambda u: (1 - ETA * 2.0) * u)) < 1e-9


@pytest.mark.parametrize("rate", [0.02, 0.1])
@pytest.mark.parametrize("horizon", [5, 20, 50])
def test_two_layer_network_matches_exact_unroll(rate: float, horizon: int) -> None:
    cosines = []
    for seed in range(12):
        model = two_layer(seed)
        batches, validation = regression_batches(seed, steps=horizon)
        problem, theta = unroll.problem_from_model(model, mse, batches, validation)
        w = torch.full((3,), 1 / 3, dtype=torch.float64)
        reference = unroll.reverse_unroll(problem, theta, w, learning_rate=rate, horizon=horizon).numpy()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        signal = mixwell.Hypergradient(points=1)
        mixer = mixwell.Mixer(model, optimizer, list(batches[0]), horizon=horizon, signal=signal, update=1.0)
        for step in batches:
            for name, batch in step.items():
                with mixer.domain(name):
                    mse(model, batch).backward()
            mixer.step()
        with mixer.validation():
            mse(model, validation).backward()
        cosines.append(tangent_cosine(np.array(list(mixer.rounds[-1].scores.values())), reference))
    assert statistics.median(cosines) >= 0.98


def warmed_up(kind: str, seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = two_layer(seed)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in regression_batches(seed + 77, steps=steps)[0]:
        optimizer.zero_grad()
        for batch in step.values():
            (mse(model, batch) / 3).backward()
        optimizer.step()
    return model, optimizer


# A fresh Adam's first step is lr * sign(g), which has no derivative where a gradient crosses zero.
STARTS = [
    (kind, start)
    for kind in OPTIMIZERS
    if kind not in NOT_DIFFERENTIATED
    for start in (0, 3)
    if start or "adam" not in kind
]


@pytest.mark.filterwarnings(UNKNOWN)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(("kind", "start"), STARTS)
def test_forward_mode_traces_are_exact(kind: str, start: int, clip_norm: float | None) -> None:
    model, optimizer = warmed_up(kind, 5, start)
    batches, validation = regression_batches(5, steps=6)
    report = measure_fidelity(
        model,
        optimizer,
        mse,
        batches,
        validation,
        signal=lambda: mixwell.Hypergradient(mixwell.ExactCurvature(), points=1),
        weights=[0.5, 0.2, 0.3],
        clip_norm=clip_norm,
        difference=1e-5,
    )
    assert report.relative_error < 1e-6


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "dampened", "adam", "adamw"])
@pytest.mark.parametrize("start", [0, 20])
def test_first_order_traces_follow_the_real_optimizer(kind: str, start: int) -> None:
    cosines = []
    for seed in range(6):
        model, optimizer = warmed_up(kind, seed, start)
        batches, validation = regression_batches(seed, steps=20)
        report = measure_fidelity(model, optimizer, mse, batches, validation, difference=1e-4)
        cosines.append(report.cosine)
    assert statistics.median(cosines) >= 0.9


def test_first_order_clipping_follows_a_clipped_run() -> None:
    cosines = []
    for seed in range(6):
        model, optimizer = warmed_up("adamw", seed, 20)
        batches, validation = regression_batches(seed, steps=20)
        report = measure_fidelity(model, optimizer, mse, batches, validation, clip_norm=0.2, difference=1e-4)
        cosines.append(report.cosine)
    assert statistics.median(cosines) >= 0.9


# ---------------------------------------------------------------------------- the mean over several iterates

SETS = [(1, 0.5), (3, 0.5), (8, 0.5), (4, 1.0), (12, 1.0)]


def mean_loss(quadratic: Quadratic, theta: torch.Tensor, w: torch.Tensor, points: tuple[int, ...]) -> float:
    """``mean_{t in S} L_V(theta_t)`` of plain SGD."""
    return float(np.mean([run(quadratic, theta, w, t) for t in points]))


@pytest.mark.parametrize(("points", "span"), SETS)
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_points_are_derivative_of_mean_loss(seed: int, points: int, span: float) -> None:
    quadratic, theta, w = setting(seed)
    signal = mixwell.Hypergradient(mixwell.ExactCurvature(), points=points, span=span)
    chosen = signal.validation_points(T)
    found = quadratic_round(quadratic, theta, w, learning_rate=ETA, horizon=T, signal=signal)
    closed = [quadratic.unrolled(theta, w, learning_rate=ETA, horizon=t).numpy() for t in chosen]
    assert relative(found, np.mean(closed, axis=0)) < 1e-9
    eps, differences = 1e-5, []
    for j in range(len(w)):
        step = torch.zeros_like(w)
        step[j] = eps
        difference = mean_loss(quadratic, theta, w + step, chosen)
        difference -= mean_loss(quadratic, theta, w - step, chosen)
        differences.append(difference / (2 * eps))
    assert relative(found, np.array(differences)) < 1e-6


@pytest.mark.parametrize(("points", "span"), SETS)
@pytest.mark.parametrize(("kind", "start"), [("sgd", 0), ("momentum", 3), ("nesterov", 0), ("adamw", 3)])
def test_forward_mode_traces_are_exact_at_several_points(
    kind: str, start: int, points: int, span: float
) -> None:
    """Against differences of real training of a network, with the optimizer's moments and clipping."""
    model, optimizer = warmed_up(kind, 5, start)
    batches, validation = regression_batches(5, steps=6)
    report = measure_fidelity(
        model,
        optimizer,
        mse,
        batches,
        validation,
        signal=lambda: mixwell.Hypergradient(mixwell.ExactCurvature(), points=points, span=span),
        weights=[0.5, 0.2, 0.3],
        clip_norm=0.1,
        difference=1e-5,
    )
    assert report.relative_error < 1e-6


TRACES = {
    "forward mode": (mixwell.ForwardModeTraces, 1e-9),
    "projected": (lambda: mixwell.ProjectedTraces(1000), 1e-9),
    "sketched": (lambda: mixwell.SketchedTraces(100_000), 1e-9),
    "subset": (lambda: mixwell.DenseTraces(only=["*"]), 1e-12),
    "bfloat16": (lambda: mixwell.DenseTraces(dtype=torch.bfloat16), 0.05),
}


@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize(("points", "span"), [(3, 0.5), (8, 1.0)])
def test_all_traces_match_dense_at_several_points(kind: str, points: int, span: float) -> None:
    make, tolerance = TRACES[kind]
    batches, validation = regression_batches(3, steps=8)
    found = []
    for traces in (mixwell.DenseTraces(), make()):
        model = two_layer(3)
        mixer = mixwell.Mixer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            list(batches[0]),
            horizon=8,
            signal=mixwell.Hypergradient(0.3, traces, points=points, span=span),
            update=1.0,
        )
        train(mixer, model, batches, validation)
        found.append(mixer.rounds[0])
    dense, other = (np.array(list(record.scores.values())) for record in found)
    assert relative(other, dense) < tolerance
    assert other.tolist() != [0.0] * 3
    noise = [np.array(list(record.noise.values())) for record in found]
    assert relative(noise[1], noise[0]) < max(20 * tolerance, 1e-6)


def test_mean_of_isotropic_traces_matches_recursion() -> None:
    """Eq. 26 at every point, word by word, and the mean of them."""
    quadratic, theta, w = setting(1)
    signal = mixwell.Hypergradient(3.0, points=4)
    found = quadratic_round(quadratic, theta, w, learning_rate=ETA, horizon=40, signal=signal)
    each = [literal(quadratic, theta, w, t, lambda u: (1 - ETA * 3.0) * u) for t in (25, 30, 35, 40)]
    assert signal.validation_points(40) == (25, 30, 35, 40)
    assert relative(found, np.mean(each, axis=0)) < 1e-9
