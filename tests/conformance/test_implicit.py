"""Implicit hypergradients against closed forms, the references of `mixwell.reference.unroll`, and whole
Hessians."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import mixwell
from helpers.toy_problems import Point, mse, names, regression_batches, two_layer
from mixwell import methods
from mixwell.reference import unroll
from mixwell.reference.quadratics import Quadratic
from mixwell.signals.implicit_gradient import ImplicitGradient, conjugate_gradient
from mixwell.signals.probes import Probes

M, D, ETA = 4, 7, 0.05


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def setting(seed: int) -> tuple[Quadratic, Tensor, Tensor]:
    quadratic = Quadratic.random(domains=M, dimension=D, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    theta = torch.randn(D, generator=generator, dtype=torch.float64)
    weights = torch.rand(M, generator=generator, dtype=torch.float64) + 0.1
    return quadratic, theta, weights / weights.sum()


class Run:
    """The real mixer on a quadratic problem; it keeps what the parameters and weights were when a round ended."""

    def __init__(self, quadratic: Quadratic, theta: Tensor, w: Tensor, signal, *, horizon: int = 1, **more):
        self.model, self.problem = Point(theta), quadratic.problem()
        probes = Probes(
            self.model,
            lambda model, batch: self.problem.losses(model.theta, 0)[int(batch[0])],
            {name: lambda j=j: torch.tensor([j]) for j, name in enumerate(names(M))},
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=ETA)
        self.mixer = mixwell.Mixer(
            self.model,
            optimizer,
            names(M),
            horizon=horizon,
            signal=signal,
            weights=w.tolist(),
            probes=probes,
            **{"update": 0.1, **more},
        )
        self.probes, self.ends, self.scores = probes, [], []

    def steps(self, count: int) -> None:
        for _ in range(count):
            for index, name in enumerate(names(M)):
                with self.mixer.domain(name):
                    self.problem.losses(self.model.theta, 0)[index].backward()
            self.mixer.step()
            if self.mixer.validation_due:
                self.ends.append(
                    (self.model.theta.detach().clone(), torch.from_numpy(self.mixer.weights.values))
                )
                with self.mixer.validation():
                    self.problem.validation(self.model.theta).backward()
                self.scores.append(np.array(list(self.mixer.rounds[-1].scores.values())))


def pieces(quadratic: Quadratic, theta: Tensor, w: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of the domains, the Hessian and the validation gradient, by hand."""
    away = theta - quadratic.centers
    gradients = torch.stack([quadratic.hessians[j] @ away[j] for j in range(M)])
    hessian = sum(w[j] * quadratic.hessians[j] for j in range(M))
    target = quadratic.validation_hessian @ (theta - quadratic.validation_center)
    return gradients.numpy(), torch.as_tensor(hessian).numpy(), target.numpy()


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_conjugate_gradient_matches_closed_form(damping: float, horizon: int) -> None:
    for seed in range(3):
        quadratic, theta, w = setting(seed)
        run = Run(quadratic, theta, w, ImplicitGradient(iterations=40, damping=damping), horizon=horizon)
        run.steps(2 * horizon)
        assert len(run.scores) == 2
        for (end, weights), scores in zip(run.ends, run.scores, strict=True):
            gradients, hessian, target = pieces(quadratic, end, weights)
            closed = -gradients @ np.linalg.solve(hessian + damping * np.eye(D), target)
            assert relative(scores, closed) < 1e-10
            reference = unroll.implicit_cg(
                quadratic.problem(), end, weights, damping=damping, tolerance=1e-13
            )
            assert relative(scores, reference.numpy()) < 1e-10


def test_matches_derivative_of_converged_training() -> None:
    quadratic, _, w = setting(5)
    run = Run(quadratic, quadratic.minimizer(w), w, ImplicitGradient(iterations=40))
    run.steps(1)  # which leaves the parameters where they are
    assert relative(run.scores[0], quadratic.implicit(w).numpy()) < 1e-9
    moved = []
    for j in range(M):
        step = torch.zeros_like(w)
        step[j] = 1e-6
        ends = [quadratic.problem().validation(quadratic.minimizer(w + sign * step)) for sign in (1, -1)]
        moved.append(float(ends[0] - ends[1]) / 2e-6)
    assert relative(run.scores[0], np.array(moved)) < 1e-6


@pytest.mark.parametrize("terms", [1, 2, 9])
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_neumann_series_matches_reference(terms: int, damping: float) -> None:
    quadratic, theta, w = setting(1)
    signal = ImplicitGradient("neumann", iterations=terms, damping=damping, learning_rate=0.03)
    run = Run(quadratic, theta, w, signal)
    run.steps(2)
    for (end, weights), scores in zip(run.ends, run.scores, strict=True):
        gradients, hessian, target = pieces(quadratic, end, weights)
        shrink = np.eye(D) - 0.03 * (hessian + damping * np.eye(D))
        series = 0.03 * sum(np.linalg.matrix_power(shrink, i) @ target for i in range(terms))
        assert relative(scores, -gradients @ series) < 1e-10
        reference = unroll.implicit_neumann(
            quadratic.problem(), end, weights, learning_rate=0.03, terms=terms, damping=damping
        )
        assert relative(scores, reference.numpy()) < 1e-10
    assert run.mixer.rounds[0].measured["products"] == terms - 1


@pytest.mark.parametrize("horizon", [1, 2])
def test_single_loop_matches_reference(horizon: int) -> None:
    quadratic, theta, w = setting(2)
    run = Run(
        quadratic,
        theta,
        w,
        ImplicitGradient("single-loop", damping=0.2, learning_rate=0.04),
        horizon=horizon,
    )
    run.steps(5 * horizon)
    v = np.zeros(D)
    for (end, weights), scores in zip(run.ends, run.scores, strict=True):
        gradients, hessian, target = pieces(quadratic, end, weights)
        v = v - 0.04 * ((hessian + 0.2 * np.eye(D)) @ v - target)
        assert relative(scores, -gradients @ v) < 1e-10
    assert run.mixer.rounds[-1].measured["products"] == 1


def test_single_loop_converges_to_implicit_hypergradient() -> None:
    """At the minimizer with weights that stay, which are those of a step size of nearly nothing."""
    quadratic, _, w = setting(3)
    signal = ImplicitGradient("single-loop", learning_rate=0.15)
    run = Run(quadratic, quadratic.minimizer(w), w, signal, update=1e-300)
    run.steps(160)
    assert relative(run.scores[-1], quadratic.implicit(w).numpy()) < 1e-9
    assert relative(run.scores[0], quadratic.implicit(w).numpy()) > 0.1


def test_warm_start_continues_from_last_solution() -> None:
    quadratic, theta, w = setting(4)
    warm = Run(quadratic, theta, w, ImplicitGradient(iterations=2, warm=True), update=1e-300)
    cold = Run(quadratic, theta, w, ImplicitGradient(iterations=2), update=1e-300)
    for run in (warm, cold):
        run.steps(12)
    gradients, hessian, target = pieces(quadratic, *warm.ends[-1])
    closed = -gradients @ np.linalg.solve(hessian, target)
    assert relative(warm.scores[0], cold.scores[0]) < 1e-12
    assert relative(warm.scores[-1], closed) < 0.1 * relative(cold.scores[-1], closed)
    assert [round_.measured["products"] for round_ in warm.mixer.rounds[:2]] == [2, 3]


def literal_truncated(matrix: np.ndarray, target: np.ndarray, iterations: int) -> np.ndarray:
    """Conjugate gradients that end at a direction of curvature that is not positive."""
    x, r = np.zeros_like(target), target.copy()
    p = r.copy()
    for _ in range(iterations):
        curvature = p @ matrix @ p
        if curvature <= 0:
            return x
        a = (r @ r) / curvature
        x, new = x + a * p, r - a * matrix @ p
        p = new + (new @ new) / (r @ r) * p
        r = new
    return x


def test_indefinite_hessian_stops_search_early() -> None:
    values = np.array([3.0, 2.0, 1.0, 0.5, -0.4])
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    matrix = basis @ np.diag(values) @ basis.T
    target = basis @ np.array([1.0, -2.0, 1.5, 0.7, 0.3])
    expected = literal_truncated(matrix, target, 50)
    products = []

    def product(vector: Tensor) -> Tensor:
        products.append(1)
        return torch.from_numpy(matrix) @ vector

    found, residual = conjugate_gradient(product, torch.from_numpy(target), iterations=50)
    assert found.numpy() == pytest.approx(expected, abs=1e-10)
    assert 2 <= len(products) < 5  # it got somewhere, and stopped
    assert residual == pytest.approx(np.linalg.norm(target - matrix @ expected) / np.linalg.norm(target))

    # Where even the first direction is of no use the weights stay.
    quadratic, theta, w = setting(0)
    saddle = Quadratic(-quadratic.hessians, quadratic.centers, quadratic.validation_hessian, theta + 1)
    run = Run(saddle, theta, w, ImplicitGradient(), update=None)
    run.steps(1)
    assert run.scores[0].tolist() == [0.0] * M
    assert run.mixer.weights.values == pytest.approx(w.numpy())


# ------------------------------------------------------------------------------------------------ networks


def network_round(
    model: nn.Module, loss: Callable, batches, validation, signal: ImplicitGradient
) -> tuple[np.ndarray, list]:
    """The scores of one round, and the probe batches that they are of."""
    drawn = []

    def draw(name: str):
        def one():
            drawn.append(batches[1][name])
            return drawn[-1]

        return one

    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        names(3),
        horizon=1,
        signal=signal,
        weights=[0.5, 0.2, 0.3],
        update=1.0,
        probes=Probes(model, loss, {name: draw(name) for name in names(3)}),
    )
    for name, batch in batches[0].items():
        with mixer.domain(name):
            loss(model, batch).backward()
    mixer.step()
    with mixer.validation():
        loss(model, validation).backward()
    return np.array(list(mixer.rounds[-1].scores.values())), drawn


def whole(model: nn.Module, loss: Callable, batches: list, validation, damping: float) -> np.ndarray:
    """``-<g_j, (H + lambda I)^-1 g_V>`` with all second derivatives, one by one."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    flat = torch.cat([p.flatten() for p in trained.values()])

    def value(vector: Tensor, batch) -> Tensor:
        parts = vector.split([p.numel() for p in trained.values()])
        named = {n: v.view_as(p) for (n, p), v in zip(trained.items(), parts, strict=True)}
        return loss(lambda *args: functional_call(model, named, args), batch)

    def total(vector: Tensor) -> Tensor:
        each = torch.stack([value(vector, batch) for batch in batches])
        return torch.tensor([0.5, 0.2, 0.3], dtype=each.dtype) @ each

    found = torch.autograd.functional.hessian(total, flat)
    assert isinstance(found, Tensor)
    hessian = found + damping * torch.eye(len(flat), dtype=flat.dtype)
    gradient = torch.func.grad(value)
    solved = torch.linalg.solve(hessian, gradient(flat, validation))
    return np.array([-float(gradient(flat, batch) @ solved) for batch in batches])


def test_network_matches_full_hessian() -> None:
    model = two_layer(0, hidden=5)
    dict(model.named_parameters())["0.bias"].requires_grad_(False)
    steps, validation = regression_batches(0, steps=2)
    signal = ImplicitGradient(iterations=400, damping=0.5)
    found, drawn = network_round(model, mse, steps, validation, signal)
    assert relative(found, whole(model, mse, drawn, validation, 0.5)) < 1e-9


class Attending(nn.Module):
    """Attention as language models have it, with dropout, which must be off here."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 12), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unsqueeze(0).unsqueeze(0).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(self.dropout(mixed.squeeze(0).squeeze(0)))


def test_attention_and_dropout() -> None:
    model = Attending().double()
    steps, validation = regression_batches(1, steps=2)
    model.eval()
    state = torch.get_rng_state()
    signal = ImplicitGradient(iterations=600, damping=0.5)
    model.train()
    model.dropout.eval()  # a module that is kept as it is
    found, drawn = network_round(model, mse, steps, validation, signal)
    assert model.training
    assert not model.dropout.training
    assert torch.equal(state, torch.get_rng_state())
    model.eval()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert relative(found, whole(model, mse, drawn, validation, 0.5)) < 1e-8


def test_zero_curvature_and_mixed_batches() -> None:
    """With linear losses only the damping is inverted."""
    model = nn.Linear(3, 1, bias=False).double()
    rows = torch.randn(4, 6, 3, dtype=torch.float64)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).mean()

    probes = Probes(model, loss, {name: lambda j=j: rows[j] for j, name in enumerate(names(3))})
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        names(3),
        horizon=1,
        signal=ImplicitGradient(damping=4.0),
        update=1.0,
        probes=probes,
    )
    with mixer.batch(np.repeat(np.arange(3), 6)) as batch:
        batch.weighted_loss(model(rows[:3].flatten(0, 1)).squeeze(1)).backward()
    mixer.step()
    with mixer.validation():
        loss(model, rows[3]).backward()
    slopes = rows.mean(dim=1).numpy()
    assert list(mixer.rounds[-1].scores.values()) == pytest.approx(-slopes[:3] @ slopes[3] / 4.0)


SIGNALS = {
    "cg": lambda: ImplicitGradient(iterations=3, warm=True, damping=0.3),
    "neumann": lambda: ImplicitGradient("neumann", iterations=3),
    "single-loop": lambda: ImplicitGradient("single-loop"),
}


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_in_mid_round_is_bit_for_bit(kind: str, stop: int, tmp_path: Path) -> None:
    quadratic, theta, w = setting(6)
    whole_run = Run(quadratic, theta, w, SIGNALS[kind](), horizon=2)
    whole_run.steps(8)
    first = Run(quadratic, theta, w, SIGNALS[kind](), horizon=2)
    first.steps(stop)
    first.mixer.save(tmp_path / "mixer")
    second = Run(quadratic, theta, w, SIGNALS[kind](), horizon=2)
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.mixer.load(tmp_path / "mixer")
    second.steps(8 - stop)
    np.testing.assert_array_equal(second.mixer.weights.history, whole_run.mixer.weights.history)
    assert torch.equal(second.model.theta, whole_run.model.theta)
    assert second.mixer.rounds == whole_run.mixer.rounds


@pytest.mark.parametrize("step_size", ["auto", 0.5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("implicit-cg", {"iterations": 3, "damping": 0.2}),
        ("implicit-neumann", {"iterations": 4, "learning_rate": 0.02}),
        ("single-loop", {}),
    ],
)
def test_recipes_and_costs(name: str, options: dict, step_size) -> None:
    method = methods.find(name)
    asked = methods.MethodContext(
        domains=tuple(names(M)),
        rows=dict.fromkeys(names(M), 9),
        batch_rows=M,
        steps=6,
        step_size=step_size,
        options=method.options.model_validate(options),
    )
    recipe = method.recipe(asked)
    assert recipe.update == (None if step_size == "auto" else 0.5)
    quadratic, theta, w = setting(7)
    run = Run(quadratic, theta, w, recipe.signal, horizon=2, update=recipe.update)
    run.steps(6)
    assert run.probes.spent == pytest.approx(3 * M * method.extra(asked).per_round)
    assert recipe.signal.nbytes == (8 * D if name == "single-loop" else 0)
    assert np.ptp(run.mixer.weights.values - w.numpy()) > 0


def test_overflow_raises_and_is_not_kept() -> None:
    quadratic, theta, w = setting(8)
    run = Run(quadratic, theta, w, ImplicitGradient("single-loop", learning_rate=1e200))
    run.steps(1)
    with pytest.raises(FloatingPointError, match="score of .* overflowed"):
        run.steps(1)

    signal = ImplicitGradient("single-loop", learning_rate=1e200)
    run = Run(quadratic, theta, w, signal, on_nonfinite="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for index, name in enumerate(names(M)):
                with run.mixer.domain(name):
                    run.problem.losses(run.model.theta, 0)[index].backward()
            run.mixer.step()
            with run.mixer.validation():
                run.problem.validation(run.model.theta).backward()
    _, tensors = signal.state()
    assert bool(tensors["carried"].isfinite().all())


def test_error_messages() -> None:
    model = two_layer(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"give Mixer\(..., probes=Probes\("):
        mixwell.Mixer(model, optimizer, names(2), horizon=1, signal=ImplicitGradient())
    for settings in (
        {"solver": "lu"},
        {"iterations": 0},
        {"damping": -1.0},
        {"learning_rate": 0.0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
            ImplicitGradient(**settings)
