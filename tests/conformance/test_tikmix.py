"""TiKMiX by its published rule (2025): the influence of domains on tasks, and the mixtures of -D and -M."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext
from mixwell.signals import influence_mixtures as search
from mixwell.signals.influence import Influence
from mixwell.signals.probes import Probes
from mixwell.simplex.updates import SoftmaxWeights

LR = 0.1
CELLS = 160
GRID = np.array([(i, j, CELLS - i - j) for i in range(CELLS + 1) for j in range(CELLS + 1 - i)]) / CELLS


def published_objective(S, w) -> float:
    """`std(Phat) - sum(Phat) - entropy(w)`, as it is published."""
    P = S @ w
    hats = P / (S.max(axis=1) + 1e-8)
    positive = w[w > 0]
    return float(hats.std() - hats.sum() + (positive * np.log(positive)).sum())


def one_task(S, prior):
    """TiKMiX-D's mixture for one task in closed form.

    Without spread the objective is `-a w - entropy(w)` with `a = S / max S`: its least is at `w ~ exp(a)`, and
    where that has less influence than the prior at `w ~ exp((1 + mu) a)`, with the mu for which it has as much.
    """
    a = S / (S.max() if S.max() > 0 else np.abs(S).max())

    def mixture(mu: float):
        w = np.exp((1 + mu) * (a - a.max()))
        return w / w.sum()

    low, high = 0.0, 1.0
    if a @ mixture(0.0) >= a @ prior:
        return mixture(0.0)
    while a @ mixture(high) < a @ prior:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if a @ mixture(middle) >= a @ prior else (middle, high)
    return mixture(high)


# ------------------------------------------------------------------------------------------------- D by numbers


@pytest.mark.parametrize("seed", range(12))
def test_direct_solution_matches_fine_grid(seed: int) -> None:
    random = np.random.default_rng(seed)
    tasks = 1 + seed % 4
    S = random.normal(0.5, 1.0, size=(tasks, 3))
    S[:, seed % 3] += 1.5  # every task has a domain that helps, as the published formula takes for granted
    prior = random.dirichlet(np.ones(3))
    found = search.direct_mixture(S, prior)
    had = GRID @ S.T
    allowed = GRID[(had >= S @ prior).all(axis=1)]
    assert len(allowed)
    costs = [published_objective(S, w) for w in allowed]
    assert (S @ found >= S @ prior - 1e-5).all()
    assert published_objective(S, found) <= min(costs) + 1e-5
    # Strictly convex, so that the best of the grid is near.
    assert np.abs(found - allowed[np.argmin(costs)]).max() < 0.05


def test_pareto_constraint_holds() -> None:
    # Two tasks that ask for two domains; the objective alone would take from the second task.
    S = np.array([[3.0, 0.1, 0.0], [0.0, 1.0, 0.2]])
    prior = np.array([0.2, 0.7, 0.1])
    free = GRID[np.argmin([published_objective(S, w) for w in GRID])]
    assert (S @ free)[1] < (S @ prior)[1] - 0.1
    found = search.direct_mixture(S, prior)
    assert (S @ found >= S @ prior - 1e-6).all()
    np.testing.assert_allclose((S @ found)[1], (S @ prior)[1], atol=1e-5)


def test_opposed_tasks_keep_prior() -> None:
    S = np.array([[1.0, 2.0], [-1.0, -2.0]])
    prior = np.array([0.3, 0.7])
    np.testing.assert_allclose(search.direct_mixture(S, prior), prior, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_one_task_matches_closed_form(seed: int) -> None:
    random = np.random.default_rng(seed)
    S = random.normal(size=6) - (3.0 if seed == 5 else 0.0)  # in the last none of the domains helps
    prior = random.dirichlet(np.ones(6) / 2)
    np.testing.assert_allclose(search.direct_mixture(S[None], prior), one_task(S, prior), atol=2e-5)


def test_least_harm_is_preferred_if_nothing_helps() -> None:
    found = search.direct_mixture(np.array([[-1.0, -2.0, -3.0]]), np.full(3, 1 / 3))
    assert found[0] > found[1] > found[2]


def test_invariant_to_influence_units() -> None:
    S = np.random.default_rng(0).normal(size=(2, 4))
    prior = np.full(4, 0.25)
    found = search.direct_mixture(S, prior)
    scaled = search.direct_mixture(S * np.array([[1e-12], [1e9]]), prior)
    np.testing.assert_allclose(scaled, found, atol=1e-5)


values = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e-300, -1e-12, 1e308, -1e308]))
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_mixture_is_never_worse_than_prior(data) -> None:
    tasks, m = data.draw(shapes)
    S = data.draw(arrays(float, (tasks, m), elements=values))
    raw = data.draw(arrays(float, m, elements=st.floats(1e-6, 1)))
    prior = raw / raw.sum()
    found = search.direct_mixture(S, prior)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1)
    hats = search.normalized(S)
    assert (hats @ found >= hats @ prior - 1e-6).all()
    both = np.stack([found, prior])
    costs = search.objective(both @ hats.T, both)
    assert costs[0] <= costs[1]


@pytest.mark.parametrize(
    "bad", [np.array([[1.0, np.nan]]), np.array([[np.inf, 1.0]]), np.ones(3), np.ones((0, 3))]
)
def test_invalid_influence_raises(bad) -> None:
    with pytest.raises(ValueError, match="finite numbers by task and domain"):
        search.direct_mixture(bad, np.full(3, 1 / 3))


# ------------------------------------------------------------------------------------------------- M by numbers


def test_candidates_are_a_latin_hypercube_around_the_prior() -> None:
    prior = np.array([0.5, 0.3, 0.2])
    drawn = search.latin_hypercube(prior, 40, np.random.default_rng(0))
    assert drawn.shape == (40, 3)
    np.testing.assert_allclose(drawn.sum(axis=1), 1)
    # Ratios of two weights lie between a quarter and four times the prior's.
    ratios = (drawn[:, 0] / drawn[:, 1]) / (0.5 / 0.3)
    assert 0.25 <= ratios.min() < 0.5
    assert 2 < ratios.max() <= 4


def test_each_stratum_is_sampled_once() -> None:
    # Then the logarithms of the factors of a domain add up to between -1 and 1, whatever their number; independent
    # ones would be off by some twenty.
    prior = np.array([0.5, 0.3, 0.2])
    drawn = search.latin_hypercube(prior, 400, np.random.default_rng(1))
    factors = np.log2(drawn / prior)
    assert np.ptp(factors) > 2
    for one, other in ((0, 1), (1, 2)):
        assert abs((factors[:, one] - factors[:, other]).sum()) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_search_finds_planted_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    prior = np.full(3, 1 / 3)
    best = prior * 2.0 ** random.uniform(-0.8, 0.8, 3)
    best /= best.sum()
    mixtures = search.latin_hypercube(prior, 256, random)
    measured = 5 - 40 * ((mixtures - best) ** 2).sum(axis=1, keepdims=True)
    predict = search.fit_trees(mixtures, measured)
    found = search.annealed_mixture(lambda points: -predict(points)[:, 0], prior, random)
    assert np.abs(found - best).max() < 0.04
    assert np.abs(prior - best).max() > 0.06


def test_search_finds_planted_optimum_of_two_tasks() -> None:
    # Each task asks for one mixture; both together for the one between.
    random = np.random.default_rng(3)
    prior = np.full(3, 1 / 3)
    wanted = np.array([[0.5, 0.3, 0.2], [0.3, 0.5, 0.2]])
    mixtures = search.latin_hypercube(prior, 256, random)
    measured = -np.stack([((mixtures - one) ** 2).sum(axis=1) for one in wanted], axis=1)
    predict = search.fit_trees(mixtures, measured)
    found = search.annealed_mixture(lambda points: -predict(points).sum(axis=1), prior, random)
    np.testing.assert_allclose(found, [0.4, 0.4, 0.2], atol=0.04)


def test_search_keeps_prior_if_nothing_is_better() -> None:
    prior = np.array([0.6, 0.4])
    found = search.annealed_mixture(lambda points: np.zeros(len(points)), prior, np.random.default_rng(0))
    np.testing.assert_array_equal(found, prior)


def test_search_stays_in_measured_region() -> None:
    prior = np.array([0.6, 0.3, 0.1])
    found = search.annealed_mixture(lambda points: -points[:, 2], prior, np.random.default_rng(0))
    assert 0.19 < found[2] <= 0.4  # twice the prior, before it is normalized


# ------------------------------------------------------------------------------------------------- the signal


def published(script: Any, *, horizon: int, damping: float, weights=None):
    """The influence of every round and the mixtures that follow, in closed form for one task."""
    steps, m, size = script.gradients.shape
    weights = np.full(m, 1 / m) if weights is None else np.asarray(weights)
    path = [weights]
    sums, counts, squares = np.zeros((m, size)), np.zeros(m), []
    for t in range(steps):
        present = ~np.isnan(script.losses[t])
        often = script.often
        scaled = np.where(present[:, None], script.gradients[t] / often[:, None], 0.0)
        sums += scaled
        counts += present / often
        squares.append((weights @ scaled) ** 2)
        if (t + 1) % horizon and t + 1 < steps:
            continue
        fisher = np.mean(squares, axis=0)
        natural = script.validation[t] / (fisher / fisher.mean() + damping)
        S = np.full(m, np.nan)
        seen = counts > 0
        S[seen] = (sums[seen] / counts[seen, None]) @ natural
        S[~seen] = S[seen].mean()
        weights = one_task(S, weights)
        path.append(weights)
        sums, counts, squares = np.zeros((m, size)), np.zeros(m), []
    return np.array(path)


def random_script(seed: int, *, steps: int = 6) -> Any:
    script: Any = Script.random(seed, steps=steps)
    script.often = np.ones(3)
    return script


@pytest.mark.parametrize("horizon", [1, 4])
def test_golden_trajectory_of_tikmix_d(horizon: int) -> None:
    script = random_script(0)
    played = play(script, Influence(0.3), SoftmaxWeights(), horizon=horizon, lr=LR, weights=[0.5, 0.3, 0.2])
    expected = published(script, horizon=horizon, damping=0.3, weights=[0.5, 0.3, 0.2])
    np.testing.assert_allclose(played.weights, expected, atol=5e-5)
    assert np.ptp(expected, axis=0).min() > 0.05


@pytest.mark.parametrize("horizon", [1, 3])
def test_absent_domains(horizon: int) -> None:
    script = random_script(1)
    script.losses[[0, 1, 2, 4], 1] = np.nan  # in the first three steps, and a whole round of three
    script.often = np.array([1.0, 0.4, 1.0])
    played = play(script, Influence(0.3), SoftmaxWeights(), horizon=horizon, lr=LR, probabilities={"d1": 0.4})
    expected = published(script, horizon=horizon, damping=0.3)
    np.testing.assert_allclose(played.weights, expected, atol=5e-5)


def test_micro_batches_add_up() -> None:
    script = random_script(2)
    noise = np.random.default_rng(0).normal(size=(6, 3, 4))
    halves = np.stack([script.gradients + noise, script.gradients - noise], axis=2)
    parts = Script(script.losses, validation=script.validation, parts=halves)
    played = play(parts, Influence(0.3), SoftmaxWeights(), horizon=3, lr=LR)
    np.testing.assert_allclose(played.weights, published(script, horizon=3, damping=0.3), atol=5e-5)


def test_influence_matches_hand_computation() -> None:
    # Combined gradient (2, 1): squares (4, 1), over their mean (1.6, .4), damped by .4: (2, .8). The target's
    # gradient (2, .8) becomes (1, 1): the influences are 4 + 0 and 0 + 2.
    script = Script(np.ones((1, 2)), np.array([[[4.0, 0.0], [0.0, 2.0]]]), np.array([[2.0, 0.8]]))
    played = play(script, Influence(0.4), SoftmaxWeights())
    assert played.mixer.rounds[0].measured == pytest.approx({"influence": 3.0, "influence_most": 4.0})
    # a = (1, .5), and no constraint in the way.
    np.testing.assert_allclose(played.weights[1][0], 1 / (1 + np.exp(-0.5)), atol=1e-6)


def test_clipping_of_combined_gradient_is_undone() -> None:
    script = random_script(3, steps=2)
    found: list[Any] = []
    for clip_norm in (None, 0.1):
        model, mixer = build(Influence(0.3), clip_norm=clip_norm, horizon=2)
        drive(model, mixer, script, range(2))
        found.append(list(mixer.rounds[0].scores.values()))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def test_cancelling_domains_have_no_curvature() -> None:
    gradients = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    script = Script(np.ones((1, 2)), gradients, np.array([[1.0, 0.0]]))
    played = play(script, Influence(0.5), SoftmaxWeights())
    # H = damping; S = (2, -2), a = (1, -1).
    np.testing.assert_allclose(played.weights[1][0], 1 / (1 + np.exp(-2)), atol=1e-6)


def build(signal: Influence, *, horizon: int = 3, probes=None, **settings):
    model = Point(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    mixer = mixwell.Mixer(
        model,
        optimizer,
        names(3),
        horizon=horizon,
        budget=6,
        signal=signal,
        update=SoftmaxWeights(),
        probes=None if probes is None else probes(model),
        **settings,
    )
    return model, mixer


def drive(model: Point, mixer: mixwell.Mixer, script: Any, steps: range) -> None:
    for t in steps:
        for j, name in enumerate(names(3)):
            with mixer.domain(name):
                (torch.from_numpy(script.gradients[t, j]) @ model.theta).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                (torch.from_numpy(script.validation[t]) @ model.theta).backward()


SLOPES = np.random.default_rng(7).normal(size=(3, 4))


def probing(model: Point) -> Probes:
    """Every domain's loss is linear, with two rows that differ a little from draw to draw."""
    count = iter(range(10**9))

    def draw(j: int):
        noise = np.random.default_rng(next(count)).normal(size=(2, 4))
        return torch.from_numpy(SLOPES[j] + 0.01 * noise)

    return Probes(
        model,
        lambda m, rows: (rows @ m.theta).mean(),
        {name: lambda j=j: draw(j) for j, name in enumerate(names(3))},
    )


def fixed_probes(model: Point) -> Probes:
    """The same rows at every draw: in a run it is the loop that keeps its place in them."""
    rows = {name: lambda j=j: torch.from_numpy(SLOPES[j : j + 1]) for j, name in enumerate(names(3))}
    return Probes(model, lambda m, batch: (batch @ m.theta).mean(), rows)


def steady(steps: int = 6) -> Any:
    """Domains and a target whose gradients stay."""
    script = random_script(4, steps=steps)
    script.gradients[:] = SLOPES
    script.validation[:] = [1.0, -0.5, 0.2, 0.3]
    return script


@pytest.mark.parametrize("candidates", [0, 12])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_in_mid_round_is_bit_for_bit(candidates: int, stop: int) -> None:
    script = steady()
    whole = build(Influence(0.3, candidates=candidates, seed=1), probes=fixed_probes)
    drive(*whole, script, range(6))
    first = build(Influence(0.3, candidates=candidates, seed=1), probes=fixed_probes)
    drive(*first, script, range(stop))
    second = build(Influence(0.3, candidates=candidates, seed=1), probes=fixed_probes)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    drive(*second, script, range(stop, 6))
    np.testing.assert_array_equal(second[1].weights.history, whole[1].weights.history)
    assert torch.equal(second[0].theta, whole[0].theta)
    assert (whole[1].weights.history[2] != whole[1].weights.history[1]).all()


def test_tikmix_m_moves_towards_tikmix_d_and_counts_cost() -> None:
    script = steady()
    direct = build(Influence(0.3))
    drive(*direct, script, range(3))
    signal = Influence(0.3, candidates=64)
    model, mixer = build(signal, probes=probing)
    before = model.theta.detach().clone()
    torch.manual_seed(3)
    expected_next = torch.rand(1)
    torch.manual_seed(3)
    drive(model, mixer, script, range(3))
    assert torch.equal(torch.rand(1), expected_next)  # the run's random stream is left alone
    assert not torch.equal(model.theta, before)
    start = np.full(3, 1 / 3)
    towards, found = direct[1].weights.values - start, mixer.weights.values - start
    assert found @ towards / np.linalg.norm(found) / np.linalg.norm(towards) > 0.9
    # 64 candidates, of every domain two rows.
    assert signal._probes is not None
    assert signal._probes.spent == 64 * 3 * 2
    assert model.theta.grad is None


def test_overflowing_influence_keeps_weights() -> None:
    script = steady()
    script.gradients[1] = 1e250
    model, mixer = build(Influence(0.3), on_nonfinite="skip")
    with pytest.warns(UserWarning, match="overflowed in round 0"):
        drive(model, mixer, script, range(6))
    history = mixer.weights.history
    np.testing.assert_array_equal(history[1], history[0])
    assert (history[2] != history[1]).any()


def test_nonfinite_probe_raises() -> None:
    def broken(model: Point) -> Probes:
        rows = {name: lambda: torch.full((1, 4), torch.nan, dtype=torch.float64) for name in names(3)}
        return Probes(model, lambda m, batch: (batch @ m.theta).mean(), rows)

    model, mixer = build(Influence(0.3, candidates=8), probes=broken)
    with pytest.raises(FloatingPointError, match="of 'd0', computed outside of the training step"):
        drive(model, mixer, steady(), range(3))


def test_memory_is_one_gradient_per_domain_plus_one() -> None:
    _, mixer = build(Influence())
    assert mixer.signal.nbytes == (3 + 1) * 4 * 8


def test_candidates_need_probes() -> None:
    with pytest.raises(ValueError, match=r"probes=Probes\(model, loss, domains\)"):
        build(Influence(candidates=8))


@pytest.mark.parametrize(
    ("given_", "match"), [({"damping": 0.0}, "damping"), ({"candidates": 3}, "candidates")]
)
def test_invalid_settings_raise(given_, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Influence(**given_)


@pytest.mark.parametrize(("package", "candidates"), [("scipy.optimize", 0), ("lightgbm", 8)])
def test_missing_package_is_named(package: str, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    model, mixer = build(Influence(candidates=candidates), probes=probing)
    with pytest.raises(ValueError, match=rf"{package.split('.')[0]}.*pip install 'mixwell\[search\]'"):
        drive(model, mixer, steady(), range(3))


# ------------------------------------------------------------------------------------------------- the methods


def task(name: str, batch_rows: int = 6, **options) -> MethodContext:
    return MethodContext(
        domains=tuple(names(3)),
        rows={"d0": 1000, "d1": 1000, "d2": 1},
        batch_rows=batch_rows,
        steps=60,
        seed=5,
        options=methods.find(name).options.model_validate(options),
    )


def test_tikmix_d_recipe_matches_rule() -> None:
    method: Any = methods.find("tikmix-d")
    recipe = method.recipe(task("tikmix-d", damping=0.3))
    script = random_script(8)
    played = play(script, recipe.signal, recipe.update, horizon=2, lr=LR)
    np.testing.assert_allclose(played.weights, published(script, horizon=2, damping=0.3), atol=5e-5)
    assert method.extra(task("tikmix-d")) == Extra()
    assert (method.horizon(60), method.horizon(61), method.horizon(3)) == (6, 7, 1)


def test_cost_of_tikmix_m() -> None:
    method: Any = methods.find("tikmix-m")
    described = task("tikmix-m", candidates=16)
    # Two rows of each of two domains; the third has one row only.
    assert method.extra(described) == Extra(per_round=16 * 5 / 6)
    assert repr(method.recipe(described).signal) == "Influence(damping=0.1, candidates=16, seed=5)"
