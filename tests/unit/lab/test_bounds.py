"""The problems' own calculus against independent ones, and the fast loop against the real mixer."""

import numpy as np
import pytest
import torch
from torch import nn

import mixwell
from helpers.toy_problems import GivenCurvature
from mixwell.lab.bounds.cells import KINDS, Cell, measure
from mixwell.lab.bounds.logistic import LogisticRegression
from mixwell.lab.bounds.problems import BilevelProblem, simplex_grid
from mixwell.lab.bounds.scaling import BestHorizon, fit
from mixwell.lab.bounds.shared_quadratics import SharedQuadratics
from mixwell.lab.bounds.simulation import leap, simulate
from mixwell.lab.bounds.theorem import compare_with_bounds, verdict
from mixwell.lab.tables import column
from mixwell.reference.quadratics import Quadratic
from mixwell.reference.theory import Constants

EVERY = [SharedQuadratics(1), LogisticRegression(2)]
names = [problem.name for problem in EVERY]


def torch_losses(problem: BilevelProblem, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses written out once more, for automatic differentiation."""
    if isinstance(problem, SharedQuadratics):
        away = theta - torch.from_numpy(problem.centers)
        matrix = torch.from_numpy(problem.matrix)
        miss = theta - torch.from_numpy(problem.target)
        validation = miss @ torch.from_numpy(problem.validation_matrix) @ miss / 2
        return torch.stack([a @ matrix @ a / 2 for a in away]), validation
    assert isinstance(problem, LogisticRegression)
    losses = nn.functional.softplus(-torch.from_numpy(problem.signed) @ theta).mean(1)
    validation = nn.functional.softplus(-torch.from_numpy(problem.validation_rows) @ theta).mean()
    return losses + problem.ridge * theta @ theta / 2, validation


@pytest.mark.parametrize("problem", EVERY, ids=names)
def test_gradients_and_hessians_match_autograd(problem: BilevelProblem) -> None:
    point = torch.randn(problem.dimension, dtype=torch.float64)
    theta = point.numpy()[None]
    jacobian = torch.func.jacrev(lambda t: torch_losses(problem, t)[0])(point)
    np.testing.assert_allclose(problem.gradients(theta)[0], jacobian.numpy(), atol=1e-12)
    slope = torch.func.grad(lambda t: torch_losses(problem, t)[1])(point)
    np.testing.assert_allclose(problem.validation_gradient(theta)[0], slope.numpy(), atol=1e-12)
    np.testing.assert_allclose(problem.validation_loss(theta)[0], torch_losses(problem, point)[1].item())
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    hessian = torch.func.hessian(lambda t: weights @ torch_losses(problem, t)[0])(point)
    np.testing.assert_allclose(problem.hessian(weights.numpy()[None], theta)[0], hessian.numpy(), atol=1e-12)


@pytest.mark.parametrize("problem", EVERY, ids=names)
def test_hypergradient_matches_finite_differences(problem: BilevelProblem) -> None:
    weights = np.array([[0.2, 0.5, 0.3]])
    assert (
        np.abs(np.einsum("bm,bmd->bd", weights, problem.gradients(problem.minimizer(weights)))).max() < 1e-12
    )
    along = np.eye(3) - 1 / 3  # directions within the simplex
    differences = (problem.outer(weights + 1e-5 * along) - problem.outer(weights - 1e-5 * along)) / 2e-5
    np.testing.assert_allclose(along @ problem.hypergradient(weights)[0], differences, rtol=1e-6, atol=1e-9)


def test_shared_quadratics_match_closed_forms() -> None:
    problem = SharedQuadratics(3)
    twin = Quadratic(
        torch.from_numpy(problem.matrix).repeat(3, 1, 1),
        torch.from_numpy(problem.centers),
        torch.from_numpy(problem.validation_matrix),
        torch.from_numpy(problem.target),
    )
    weights = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    np.testing.assert_allclose(problem.minimizer(weights.numpy()[None])[0], twin.minimizer(weights).numpy())
    np.testing.assert_allclose(
        problem.hypergradient(weights.numpy()[None])[0], twin.implicit(weights).numpy()
    )


@pytest.mark.parametrize("problem", EVERY, ids=names)
def test_noise_is_unbiased_and_within_its_constants(problem: BilevelProblem) -> None:
    random = np.random.default_rng(0)
    theta = np.repeat(problem.start[None], 40_000, 0)
    exact = problem.gradients(theta[:1])
    away = problem.noisy_gradients(theta, random) - exact
    sigma = problem.constants(noisy=True).noise
    assert (away**2).sum(-1).mean(0).max() <= sigma**2 * (1 + 1e-9)
    assert np.linalg.norm(away, axis=-1).max() <= problem.noise_bound + 1e-9
    assert np.abs(away.mean(0)).max() < 5 * sigma / np.sqrt(len(theta))
    validation = problem.noisy_validation_gradient(theta, random) - problem.validation_gradient(theta[:1])
    assert (validation**2).sum(-1).mean() <= sigma**2 * (1 + 1e-9)
    assert np.abs(validation.mean(0)).max() < 5 * sigma / np.sqrt(len(theta))


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("problem", EVERY, ids=names)
def test_constants_bound_observed_values(problem: BilevelProblem, noisy: bool) -> None:
    c: Constants = problem.constants(noisy=noisy)
    random = np.random.default_rng(1)
    theta = np.repeat(problem.start[None], 50, 0)
    weights = random.dirichlet(np.ones(3), 50)
    for step in range(400):
        if step % 40 == 0:
            weights = random.dirichlet(np.full(3, 0.3), 50)
        gradients = problem.noisy_gradients(theta, random) if noisy else problem.gradients(theta)
        assert np.linalg.norm(problem.gradients(theta), axis=-1).max() <= c.gradient
        assert np.linalg.norm(problem.validation_gradient(theta), axis=-1).max() <= c.validation_gradient
        values = np.linalg.eigvalsh(problem.hessian(weights, theta))
        assert values.min() >= c.strong_convexity - 1e-9
        assert values.max() <= c.smoothness + 1e-9
        theta = theta - 0.9 / c.smoothness * np.einsum("bm,bmd->bd", weights, gradients)


@pytest.mark.parametrize("problem", EVERY, ids=names)
def test_best_weights_match_grid(problem: BilevelProblem) -> None:
    weights, value = problem.best()
    assert value == pytest.approx(float(problem.outer(weights[None])[0]))
    grid = problem.outer(simplex_grid(3, 60)).min()
    assert value <= grid + 1e-8
    assert value >= grid - 1e-3
    assert problem.convexity_violations()[0] == 0


@pytest.mark.parametrize("curvature", ["isotropic", "diagonal", "exact"])
def test_fast_loop_matches_mixer(curvature: str) -> None:
    problem, horizon, rounds, eta, alpha = SharedQuadratics(4), 7, 5, 0.05, 0.3
    outcome = simulate(
        problem,
        budget=horizon * rounds + 3,  # what is left over is not a round
        horizons=np.array([horizon, 2.0]),
        learning_rates=np.array([eta, 0.01]),
        step_sizes=np.array([alpha, 0.1]),
        curvature=curvature,
    )
    # One parameter per coordinate, so that each can have a curvature of its own.
    model = nn.ParameterList(nn.Parameter(one) for one in torch.from_numpy(problem.start.copy()))
    diagonal = {str(i): float(problem.matrix[i, i]) for i in range(len(model))}
    signals = {
        "isotropic": lambda: mixwell.Hypergradient(2.5, points=1),
        "diagonal": lambda: mixwell.Hypergradient(GivenCurvature(diagonal), points=1),
        "exact": lambda: mixwell.Hypergradient(mixwell.ExactCurvature(), points=1),
    }
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=eta),
        ["a", "b", "c"],
        budget=horizon * rounds,
        horizon=horizon,
        update=alpha,
        signal=signals[curvature](),
    )
    used: list[list[float]] = []
    for _ in range(horizon * rounds):
        for index, name in enumerate("abc"):
            with mixer.domain(name):
                torch_losses(problem, torch.stack(list(model)))[0][index].backward(
                    create_graph=mixer.signal.requirements.graph
                )
        mixer.step()
        if mixer.validation_due:
            used.append(list(mixer.weights.last.values()))
            with mixer.validation():
                torch_losses(problem, torch.stack(list(model)))[1].backward()
    np.testing.assert_allclose(outcome.average[0], np.mean(used, 0), rtol=1e-10)


@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
@pytest.mark.parametrize("curvature", ["isotropic", "diagonal", "exact"])
def test_theorem_holds(kind: str, curvature: str) -> None:
    rows = measure(
        Cell("theorem", kind, 5, False, curvature, 600),
        report=lambda _: None,
        stopping=lambda: False,
    )
    assert rows
    for gap, bound in zip(column(rows, "gap"), column(rows, "bound"), strict=True):
        assert 0 <= gap <= bound
    assert max(column(rows, "error_ratio")) <= 1
    errors = column(rows, "error")
    if curvature == "exact":
        assert errors[-1] < 1e-3 * errors[0]  # the bias fades with T ...
    else:
        assert errors[-1] > 1e-4  # ... and delta's part does not


def test_vectorized_rounds_match_steps() -> None:
    problem = SharedQuadratics(6)
    settings = {
        "budget": 300,
        "horizons": np.array([30.0, 100.0]),
        "learning_rates": np.array([0.05, 0.03]),
        "step_sizes": np.array([0.3, 0.1]),
        "error_bounds": lambda rows, distances: distances + 1.0 + rows,
    }
    slow = simulate(problem, curvature="exact", **settings)
    fast = leap(problem, **settings)
    np.testing.assert_allclose(fast.average, slow.average, rtol=1e-10)
    np.testing.assert_allclose(fast.error, slow.error, rtol=1e-6)
    np.testing.assert_allclose(fast.error_ratio, slow.error_ratio, rtol=1e-6)


@pytest.mark.parametrize("problem", EVERY, ids=names)
@pytest.mark.parametrize("curvature", ["isotropic", "diagonal", "exact"])
def test_curvature_constants_bound_a_fine_grid(problem: BilevelProblem, curvature: str) -> None:
    grid = simplex_grid(3, 40)
    star = problem.minimizer(grid)
    used, exact = problem.curvature(curvature, grid, star), problem.hessian(grid, star)
    c = problem.constants(curvature)
    values = np.linalg.eigvalsh(used)
    assert values.min() >= c.least_curvature - 1e-12
    assert values.max() <= c.greatest_curvature + 1e-12
    assert np.abs(np.linalg.eigvalsh(used - exact)).max() <= c.curvature_error + 1e-12


def test_fit_recovers_power_law() -> None:
    budgets = [100, 1000, 10_000]

    def best(seed: int, budget: int, horizon: float) -> BestHorizon:
        return BestHorizon(seed, budget, horizon, 0.1, 2.0 * np.sqrt(budget * np.log(budget)), 0.2, 5, 1)

    noisy = [best(s, n, (1 + s) * (n * np.log(n)) ** (0.4 + s / 100)) for s in range(4) for n in budgets]
    found = fit("any", noisy, noisy=True)
    assert found.slope.mean == pytest.approx(0.415)
    assert found.late.mean == pytest.approx(0.415)
    assert found.theory == pytest.approx(0.5)
    # Student's interval of 0.40, 0.41, 0.42, 0.43, with t = 3.182
    assert found.slope.high - found.slope.mean == pytest.approx(3.182 * 0.0129099 / 2, rel=0.02)
    full = [best(s, n, s + 3 * np.log(n)) for s in range(4) for n in budgets]
    assert fit("any", full, noisy=False).slope.mean == pytest.approx(3.0)


def theorem_row(**changes: object) -> dict[str, object]:
    row = {
        "purpose": "theorem",
        "kind": "quadratic",
        "seed": 0,
        "noisy": 0,
        "curvature": "exact",
        "budget": 100,
    }
    row |= {"copies": 1, "horizon": 30, "learning_rate": 0.05, "gap": 0.1, "bound": 0.2, "error": 0.1}
    return {**row, "error_ratio": 0.5, **changes}


@pytest.mark.parametrize(
    "broken",
    [
        {"gap": 0.3},
        {"gap": float("nan")},
        {"error_ratio": 1.5},
        {"error_ratio": float("nan")},
        {"horizon": 300, "error": 0.099},  # hardly less after 270 more steps
    ],
)
def test_violated_inequality_is_detected(broken: dict[str, object]) -> None:
    right = [theorem_row(), theorem_row(horizon=300, error=1e-6)]
    (found,) = compare_with_bounds(right)
    assert found.holds
    assert found.informative == 2
    assert "they all hold" in verdict([found])[0]
    (found,) = compare_with_bounds([right[0], theorem_row(**broken)])
    assert not found.holds
    assert "do NOT hold for quadratic, exact" in verdict([found])[0]


def test_kinds_differ_by_seed() -> None:
    for make in KINDS.values():
        assert not np.array_equal(make(0).start, make(1).start)
