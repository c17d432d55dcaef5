"""PiKE by its published rule (Li et al. 2025): `w_k ~ w_k exp(zeta1 G_k - zeta2 / (2 b) s2_k)`, and its bound."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext
from mixwell.signals.gradient_moments import DescentBound, GradientMoments, least_on_simplex
from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights

LR, BATCH = 0.1, 12


def halves(seed: int, *, steps: int = 10, domains: int = 3, size: int = 4) -> Any:
    """Every domain's batch in two parts of two rows, whose gradients differ, by more in some domains."""
    random = np.random.default_rng(seed)
    mean = random.normal(size=(steps, domains, 1, size))
    noise = random.normal(size=(steps, domains, 2, size)) * np.array([0.1, 1.0, 3.0])[:, None, None]
    losses = random.uniform(0.5, 2.0, (steps, domains))
    return Script(losses, parts=mean + noise, part_rows=2)


def moments(parts, rows: int, *, unbiased: bool) -> tuple[float, float]:
    """G and s2 of one domain from two parts of so many rows: E |g1 - g2|^2 = s2 (1/n1 + 1/n2)."""
    first, second = parts
    s2 = np.sum((first - second) ** 2) / (1 / rows + 1 / rows)
    size = np.sum(((first + second) / 2) ** 2)
    return (size - s2 / (2 * rows) if unbiased else size), s2


def published(script: Any, zeta1: float, zeta2: float, *, horizon: int = 1, unbiased: bool, tau=None):
    """Weights by round, and the factors of the losses in each round."""
    steps, m = script.losses.shape
    weights = np.full(m, 1 / m)
    path, factors = [weights], [np.ones(m) if tau is None else np.full(m, tau / m)]
    seen: list[Any] = []
    for t in range(steps):
        both = [moments(script.parts[t, k], script.part_rows, unbiased=unbiased) for k in range(m)]
        seen.append((np.array(both), script.losses[t]))
        if (t + 1) % horizon and t + 1 < steps:
            continue
        size, noise = np.mean([one for one, _ in seen], axis=0).T
        f = factors[0]
        if tau is not None:
            exps = np.exp(tau * np.mean([losses for _, losses in seen], axis=0))
            f = tau * exps / exps.sum()
        weights = weights * np.exp(f**2 * (zeta1 * size - zeta2 / (2 * BATCH) * noise))
        weights = weights / weights.sum()
        path.append(weights)
        factors.append(f)
        seen = []
    return np.array(path), np.array(factors)


# ------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("horizon", [1, 4])
def test_golden_trajectory(horizon: int, unbiased: bool) -> None:
    script = halves(0)
    signal = GradientMoments(0.2, 0.5, batch_rows=BATCH, unbiased=unbiased)
    assert not signal.requirements.validation
    assert not signal.requirements.losses
    played = play(script, signal, MirrorDescent(1.0), horizon=horizon, lr=LR)
    expected, _ = published(script, 0.2, 0.5, horizon=horizon, unbiased=unbiased)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-9)
    assert np.ptp(expected, axis=0).min() > 0.05


def test_one_step_matches_hand_computation() -> None:
    # Domain 0: parts (2, 0) and (4, 0) of one row: g = (3, 0), s2 = 4 / 2 = 2, G = 9 - 2 / 2 = 8.
    # Domain 1: parts (0, 1) and (0, 1): s2 = 0, G = 1. With zeta = (.25, .5), b = 1 the gains are 2 - .5 and .25.
    parts = np.array([[[[2.0, 0.0], [4.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]])
    signal = GradientMoments(0.25, 0.5, batch_rows=1)
    played = play(Script(np.ones((1, 2)), parts=parts), signal, MirrorDescent(1.0))
    np.testing.assert_allclose(list(played.mixer.rounds[0].scores.values()), [-1.5, -0.25], rtol=1e-12)
    np.testing.assert_allclose(played.weights[1][0], 1 / (1 + np.exp(-1.25)), rtol=1e-12)
    assert played.mixer.rounds[0].measured == {"noise_scale_least": 0.0, "noise_scale_most": 0.25}


@pytest.mark.parametrize("tau", [1.0, 3.0])
@pytest.mark.parametrize("horizon", [1, 4])
def test_balanced_variant(horizon: int, tau: float) -> None:
    script = halves(1)
    signal = GradientMoments(0.2, 0.5, batch_rows=BATCH, tau=tau)
    assert signal.requirements.losses
    played = play(script, signal, MirrorDescent(1.0), horizon=horizon, lr=LR)
    weights, factors = published(script, 0.2, 0.5, horizon=horizon, unbiased=True, tau=tau)
    np.testing.assert_allclose(played.weights, weights, rtol=1e-9)
    # The training step has the losses multiplied.
    theta = np.zeros(4)
    for t in range(9):
        gradient = script.parts[t].mean(axis=1)
        theta = theta - LR * (weights[t // horizon] * factors[t // horizon]) @ gradient
        np.testing.assert_allclose(played.parameters[t + 1], theta, rtol=1e-9, atol=1e-12)


def test_unseen_domain_gets_mean_of_others() -> None:
    script = halves(2, steps=2)
    script.losses[:, 1] = np.nan
    played = play(script, GradientMoments(0.2, 0.5, batch_rows=BATCH), MirrorDescent(1.0), horizon=2)
    both = np.array([[moments(script.parts[t, k], 2, unbiased=True) for k in (0, 2)] for t in range(2)]).mean(
        axis=0
    )
    gains = 0.2 * both[:, 0] - 0.5 / (2 * BATCH) * both[:, 1]
    expected = -np.array([gains[0], gains.mean(), gains[1]])
    np.testing.assert_allclose(list(played.mixer.rounds[0].scores.values()), expected, rtol=1e-9)


def test_mean_is_over_steps_that_contain_domain() -> None:
    script = halves(3, steps=3)
    script.losses[1, 1] = np.nan
    played = play(script, GradientMoments(0.2, 0.5, batch_rows=BATCH), MirrorDescent(1.0), horizon=3)
    seen = [moments(script.parts[t, 1], 2, unbiased=True) for t in (0, 2)]
    size, noise = np.mean(seen, axis=0)
    score = -(0.2 * size - 0.5 / (2 * BATCH) * noise)
    assert played.mixer.rounds[0].scores["d1"] == pytest.approx(score, rel=1e-9)


# ------------------------------------------------------------------------------------------------- the estimates


def step(mixer: mixwell.Mixer, model: Point, batches: dict[str, list[tuple[Any, int]]]) -> None:
    """The parts of the domains in turn, as loops over micro-batches have them."""
    for i in range(max(len(parts) for parts in batches.values())):
        for name, parts in batches.items():
            gradient, rows = parts[i]
            share = rows / sum(n for _, n in parts)
            with mixer.domain(name, fraction=share, rows=rows):
                (torch.as_tensor(gradient) @ model.theta).backward()
    mixer.step()


def measured(*batches: list[tuple[Any, int]], **settings) -> Any:
    """G and s2 of batches, each in parts with their rows; a second domain has the same."""
    model, signal = Point(len(batches[0][0][0])), GradientMoments(1.0, 1.0, batch_rows=BATCH, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=1, signal=signal, update=1.0)
    found: list[Any] = []
    for parts in batches:
        step(mixer, model, {"d0": parts, "d1": parts})
        size, noise = signal._last
        found.append((size[0], noise[0]))
    return np.array(found)


def test_single_rows_give_the_sample_variance() -> None:
    rows = np.random.default_rng(0).normal(2.0, 1.0, size=(7, 5))
    size, noise = measured([(row, 1) for row in rows])[0]
    assert noise == pytest.approx(rows.var(axis=0, ddof=1).sum(), rel=1e-12)
    assert size == pytest.approx((rows.mean(axis=0) ** 2).sum() - noise / 7, rel=1e-12)
    biased, _ = measured([(row, 1) for row in rows], unbiased=False)[0]
    assert biased == pytest.approx((rows.mean(axis=0) ** 2).sum(), rel=1e-12)


def test_unequal_parts_are_unbiased() -> None:
    random = np.random.default_rng(1)
    mean, spread = np.array([1.0, -0.5, 0.2]), np.array([0.5, 1.0, 2.0])
    batches: list[Any] = []
    for _ in range(400):
        rows = mean + spread * random.normal(size=(8, 3))
        batches.append([(part.mean(axis=0), len(part)) for part in np.split(rows, [1, 3])])
    found = measured(*batches)
    means, errors = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(len(found))
    truth = np.array([(mean**2).sum(), (spread**2).sum()])
    assert (np.abs(means - truth) < 4 * errors).all()
    # Without the correction G would be off by s2 / 8, which the test must be able to see.
    assert (spread**2).sum() / 8 > 5 * errors[0]


def test_small_noise_is_not_lost_in_rounding() -> None:
    size, noise = measured([(np.array([1e6 + 1e-3]), 1), (np.array([1e6 - 1e-3]), 1)])[0]
    assert noise == pytest.approx(2e-6, rel=1e-3)
    assert size == pytest.approx(1e12)


def test_missing_gradient_counts_as_zero() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.b = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    model, signal = Two(), GradientMoments(1.0, 0.0, batch_rows=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=1, signal=signal, update=1.0)
    for name in names(2):
        with mixer.domain(name, fraction=0.5, rows=1):
            (3 * model.a.sum() + model.b.sum()).backward()
        with mixer.domain(name, fraction=0.5, rows=1):
            (3 * model.a.sum()).backward()
    mixer.step()
    size, noise = signal._last
    np.testing.assert_allclose([size[0], noise[0]], [9 + 0.25 - 0.25, 0.5])


# ------------------------------------------------------------------------------------------------- the bound


def golden(theta1: float, theta2: float, s2_1: float, s2_2: float, b: float, eta: float) -> float:
    """The best weight of the first of two quadratics, as the paper has it."""
    squares = theta1**2 + theta2**2
    inside = (s2_2 - s2_1) / b + (theta1**2 - theta2**2) / eta + theta2**2
    return float(np.clip(inside / squares, 0, 1))


CASES = [
    (1.0, 1.0, 1.0, 1.0, 8.0, 0.1),
    (1.0, 1.05, 1.0, 2.0, 4.0, 0.3),
    (2.0, 1.9, 3.0, 0.5, 2.0, 0.5),
    (3.0, 1.0, 0.0, 0.0, 8.0, 0.1),
    (0.1, 1.0, 1.0, 1.0, 8.0, 0.2),
]


@pytest.mark.parametrize(("theta1", "theta2", "s2_1", "s2_2", "b", "eta"), CASES)
def test_two_quadratics(theta1, theta2, s2_1, s2_2, b, eta) -> None:
    """`theta_1^2 / 2` and `theta_2^2 / 2` in the plane; noise of variance s2 in each of its two directions."""
    expected = golden(theta1, theta2, s2_1, s2_2, b, eta)

    # The golden formula is where the expected loss after the step is least.
    def after(w1: float) -> float:
        w2 = 1 - w1
        squares = theta1**2 * (1 - eta * w1) ** 2 + theta2**2 * (1 - eta * w2) ** 2
        return (squares + eta**2 * (w1 * 2 * s2_1 + w2 * 2 * s2_2) / b) / 2

    grid = np.linspace(0, 1, 2001)
    assert abs(grid[np.argmin([after(w) for w in grid])] - expected) < 1e-3

    size = np.array([theta1**2, theta2**2])
    noise = 2 * np.array([s2_1, s2_2])  # of both directions
    found = least_on_simplex(-eta * size + eta**2 / (2 * b) * noise, eta**2 * size)
    np.testing.assert_allclose(found, [expected, 1 - expected], atol=1e-12)


@pytest.mark.parametrize(("theta1", "theta2", "s2_1", "s2_2", "b", "eta"), CASES)
def test_two_quadratics_through_the_mixer(theta1, theta2, s2_1, s2_2, b, eta) -> None:
    # Two rows that lie apart by 2 e have a variance of 2 e^2, which shall be 2 s2.
    parts = np.array([[[[theta1, 0.0]] * 2, [[0.0, theta2]] * 2]])
    parts[0, :, 0, 0] += np.sqrt([s2_1, s2_2])
    parts[0, :, 1, 0] -= np.sqrt([s2_1, s2_2])
    signal = GradientMoments(0.0, 0.0, batch_rows=int(b), unbiased=False, bound=DescentBound(1.0))
    played = play(Script(np.ones((1, 2)), parts=parts), signal, SoftmaxWeights(), lr=eta, weights=[0.9, 0.1])
    expected = golden(theta1, theta2, s2_1, s2_2, b, eta)
    np.testing.assert_allclose(played.weights[1], [expected, 1 - expected], atol=1e-9)


numbers = st.floats(-1e3, 1e3)
curves = st.one_of(st.just(0.0), st.floats(1e-9, 1e3))


@given(
    st.integers(1, 6).flatmap(
        lambda m: st.tuples(arrays(float, m, elements=numbers), arrays(float, m, elements=curves))
    )
)
def test_minimum_satisfies_optimality_conditions(problem) -> None:
    linear, quadratic = problem
    weights = least_on_simplex(linear, quadratic)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1)
    slopes = linear + quadratic * weights
    size = max(np.ptp(linear), quadratic.max(), 1e-300)
    # No weight can be moved to where the slope is less.
    assert (slopes[weights > 1e-6] - slopes.min() <= 1e-6 * size).all()


@pytest.mark.parametrize("seed", range(8))
def test_minimum_matches_solver(seed: int) -> None:
    random = np.random.default_rng(seed)
    linear, quadratic = random.normal(size=5), random.uniform(0.1, 3, size=5)
    solved = minimize(
        lambda w: linear @ w + quadratic @ w**2 / 2,
        np.full(5, 0.2),
        jac=lambda w: linear + quadratic * w,
        method="SLSQP",
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(least_on_simplex(linear, quadratic), solved.x, atol=1e-6)


def test_minimum_with_extreme_coefficients() -> None:
    # Two domains that cost next to nothing share the weight by their own curvatures, whatever a third costs.
    found = least_on_simplex(np.array([0.0, 0.0, 1e6]), np.array([1e-9, 3e-9, 1.0]))
    np.testing.assert_allclose(found, [0.75, 0.25, 0.0])
    np.testing.assert_allclose(least_on_simplex(np.array([1.0, 1.0, 2.0]), np.zeros(3)), [0.5, 0.5, 0.0])
    np.testing.assert_allclose(least_on_simplex(np.array([0.0, 1.0]), np.array([1.5, 0.0])), [2 / 3, 1 / 3])
    np.testing.assert_allclose(
        least_on_simplex(np.zeros(2), np.array([1e300, 1e-300])), [0.0, 1.0], atol=1e-12
    )
    # A little curvature counts: level + 20 (level - .96) = 1.
    found = least_on_simplex(np.array([0.0, 0.96]), np.array([1.0, 0.05]))
    np.testing.assert_allclose(found, [20.2 / 21, 0.8 / 21], rtol=1e-12)
    for bad in (np.nan, -1.0):
        with pytest.raises(ValueError, match="no negative curvature"):
            least_on_simplex(np.zeros(2), np.array([1.0, bad]))


def test_negative_norm_estimates_add_no_curvature() -> None:
    # s2 = 2, |g|^2 = 0, so G = -1 without bias: lam = .1 + small, kap = 0, beside G = 1 of the other.
    parts = np.array([[[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]])
    signal = GradientMoments(0.0, 0.0, batch_rows=4, bound=DescentBound(1.0))
    played = play(Script(np.ones((1, 2)), parts=parts), signal, SoftmaxWeights(), lr=LR)
    np.testing.assert_allclose(played.weights[1], [0.0, 1.0], atol=1e-12)


# ------------------------------------------------------------------------------------------------- a run


def build(signal: GradientMoments, horizon: int = 3, **settings):
    model = Point(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    update = MirrorDescent(1.0) if signal.bound is None else SoftmaxWeights()
    return model, mixwell.Mixer(
        model, optimizer, names(3), horizon=horizon, budget=9, signal=signal, update=update, **settings
    )


def drive(model: Point, mixer: mixwell.Mixer, script: Any, steps: range) -> None:
    for t in steps:
        for j, name in enumerate(names(3)):
            for part in script.parts[t, j]:
                with mixer.domain(name, fraction=0.5, rows=2) as scope:
                    (torch.from_numpy(part) @ model.theta).backward()
                    scope.record_loss(script.losses[t, j])
        mixer.step()


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tau", [None, 3.0])
def test_resume_in_mid_round_is_bit_for_bit(tau: float | None, stop: int) -> None:
    script = halves(4)
    whole = build(GradientMoments(0.2, 0.5, batch_rows=BATCH, tau=tau))
    drive(*whole, script, range(9))
    first = build(GradientMoments(0.2, 0.5, batch_rows=BATCH, tau=tau))
    drive(*first, script, range(stop))
    second = build(GradientMoments(0.2, 0.5, batch_rows=BATCH, tau=tau))
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    drive(*second, script, range(stop, 9))
    np.testing.assert_array_equal(second[1].weights.history, whole[1].weights.history)
    assert torch.equal(second[0].theta, whole[0].theta)
    assert second[1].rounds == whole[1].rounds


def test_memory_is_one_gradient_per_domain() -> None:
    model, mixer = build(GradientMoments(0.2, 0.5, batch_rows=BATCH))
    drive(model, mixer, halves(5), range(4))
    assert mixer.signal.nbytes == 3 * 4 * 8


def test_missing_losses_rows_or_parts_raise() -> None:
    model, mixer = build(GradientMoments(0.2, 0.5, batch_rows=BATCH, tau=1.0), horizon=1)
    with pytest.raises(ValueError, match="requires the losses"):
        with mixer.domain("d0", rows=2):
            model.theta.sum().backward()
    model, mixer = build(GradientMoments(0.2, 0.5, batch_rows=BATCH), horizon=1)
    with pytest.raises(ValueError, match="needs the rows of every part"):
        with mixer.domain("d0"):
            model.theta.sum().backward()
    model, mixer = build(GradientMoments(0.2, 0.5, batch_rows=BATCH), horizon=1)
    for name in names(3):
        with mixer.domain(name, rows=4):
            model.theta.sum().backward()
    with pytest.raises(ValueError, match="every batch of this round came in one part"):
        mixer.step()


@pytest.mark.parametrize("bound", [None, DescentBound(1.0)])
def test_single_rows_keep_weights(bound: DescentBound | None) -> None:
    signal = GradientMoments(0.2, 0.5, batch_rows=3, bound=bound)
    model, mixer = build(signal, horizon=1, weights=[0.5, 0.3, 0.2])
    for name in names(3):
        with mixer.domain(name, rows=1):
            model.theta.sum().backward()
    mixer.step()
    np.testing.assert_allclose(mixer.weights.values, [0.5, 0.3, 0.2])


@pytest.mark.parametrize("bound", [None, DescentBound(1.0)])
def test_overflowing_norm_keeps_weights(bound: DescentBound | None) -> None:
    script = halves(6)
    script.parts[1, 1] = 1e200
    model, mixer = build(GradientMoments(0.2, 0.5, batch_rows=BATCH, bound=bound), on_nonfinite="skip")
    with pytest.warns(UserWarning, match="overflowed in round 0"):
        drive(model, mixer, script, range(6))
    history = mixer.weights.history
    np.testing.assert_array_equal(history[1], history[0])
    assert (history[2] != history[1]).any()


@pytest.mark.parametrize("settings", [{"zeta1": -1.0}, {"zeta2": np.nan}, {"batch_rows": 0}, {"tau": 0.0}])
def test_invalid_settings_raise(settings) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        GradientMoments(**{"zeta1": 0.1, "zeta2": 0.1, "batch_rows": 4, **settings})


def test_bound_without_curvature_raises() -> None:
    with pytest.raises(ValueError, match="smoothness of a descent bound"):
        DescentBound(0.0)


# ------------------------------------------------------------------------------------------------- the methods


def task(name: str, **options) -> MethodContext:
    return MethodContext(
        domains=tuple(names(3)),
        rows=dict.fromkeys(names(3), 1000),
        batch_rows=BATCH,
        steps=9,
        seed=0,
        options=methods.find(name).options.model_validate(options),
    )


@pytest.mark.parametrize(("name", "tau"), [("pike", None), ("pike-balanced", 3.0)])
def test_recipes_match_rule(name: str, tau: float | None) -> None:
    script = halves(7)
    method: Any = methods.find(name)
    balanced = {} if tau is None else {"tau": tau}
    recipe = method.recipe(task(name, zeta1=0.2, zeta2=0.5, **balanced))
    played = play(script, recipe.signal, recipe.update, horizon=method.horizon(9), lr=LR)
    expected, _ = published(script, 0.2, 0.5, unbiased=True, tau=tau)
    np.testing.assert_allclose(played.weights, expected, rtol=1e-9)
    assert method.extra(task(name)) == Extra()
    assert not method.needs.validation
    assert (method.horizon(9), method.horizon(1000), method.horizon(1001)) == (1, 10, 11)


def test_conceptual_form_sets_weights() -> None:
    recipe = methods.find("pike").recipe(
        task("pike", form="conceptual", smoothness=2.0, beta=0.5, gamma=3.0, eta=0.2, unbiased=False)
    )
    script = halves(8, steps=1)
    played = play(script, recipe.signal, recipe.update, weights=[0.8, 0.1, 0.1])
    both = np.array([moments(script.parts[0, k], 2, unbiased=False) for k in range(3)])
    linear = -0.2 * 0.5 * both[:, 0] + 2.0 * 0.2**2 / (2 * BATCH) * both[:, 1]
    quadratic = 2.0 * 0.2**2 * 3.0 * both[:, 0]
    solved = minimize(
        lambda w: linear @ w + quadratic @ w**2 / 2,
        np.full(3, 1 / 3),
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(played.weights[1], solved.x, atol=1e-5)
