"""Data Mixing Laws: planted laws are found again, outliers do not matter, and the minimum is the minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixwell import methods
from mixwell.methods import MethodContext, Outcome
from mixwell.methods.mixing_laws import MixingLawsOptions
from mixwell.methods.search import laws, mixtures
from mixwell.methods.search.laws import MixingLaw


def planted(c: float, k: list[float], t: list[list[float]], r: np.ndarray) -> np.ndarray:
    """``c + sum_i k_i exp(sum_j t_ij r_j)``, term by term as it is written."""
    found = np.full(len(r), c)
    for scale, slopes in zip(k, t, strict=True):
        found += scale * np.exp(sum(slope * r[:, j] for j, slope in enumerate(slopes)))
    return found


Planted = tuple[float, list[float], list[list[float]]]
ONE: Planted = (2.0, [0.8], [[-1.5, 0.4, 0.9]])
TWO: Planted = (2.0, [0.5, 0.7], [[-2.0, 0.6, 0.2], [0.5, -1.6, 0.3]])
FOUR_DOMAINS: Planted = (1.2, [0.9, 0.3], [[-2.0, 0.5, 0.1, 0.4], [0.8, -1.0, -0.6, 0.2]])


def drawn(count: int, domains: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(domains), count)


# --------------------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize(("law", "parts"), [(ONE, 1), (ONE, 2), (TWO, 2), (TWO, 3), (FOUR_DOMAINS, 2)])
def test_fit_recovers_planted_law(law: Planted, parts: int) -> None:
    m = len(law[2][0])
    tried, new = drawn(32, m, 0), drawn(500, m, 1)
    found = laws.fit(tried, planted(*law, tried), parts=parts, starts=8)
    np.testing.assert_allclose(found.predict(new), planted(*law, new), atol=1e-3)
    np.testing.assert_allclose(found.predict(np.eye(m)), planted(*law, np.eye(m)), atol=2e-2)  # the corners


def test_one_term_parameters_are_recovered_up_to_gauge() -> None:
    tried = drawn(32, 3, 0)
    found = laws.fit(tried, planted(*ONE, tried))
    c, (k,), (t,) = ONE
    assert found.constant == pytest.approx(c, abs=1e-3)
    np.testing.assert_allclose(found.slopes[0], np.array(t) - np.mean(t), atol=5e-3)
    # k exp(t r) = (k e^a) exp((t - a) r) on weights that sum to one
    assert np.exp(found.levels[0]) == pytest.approx(k * np.exp(np.mean(t)), abs=5e-3)


def test_fit_is_robust_to_outlier() -> None:
    tried, new = drawn(40, 3, 0), drawn(500, 3, 1)
    losses = planted(*ONE, tried)
    losses[7] += 3.0
    robust = laws.fit(tried, losses)
    squares = laws.fit(tried, losses, huber=1e6)
    assert np.abs(robust.predict(new) - planted(*ONE, new)).max() < 0.01
    assert np.abs(squares.predict(new) - planted(*ONE, new)).max() > 0.1


def test_fit_is_independent_of_loss_unit() -> None:
    tried, new = drawn(32, 3, 0), drawn(50, 3, 1)
    losses = planted(*ONE, tried) + np.random.default_rng(2).normal(scale=0.01, size=32)
    first, second = laws.fit(tried, losses), laws.fit(tried, 1000 * losses - 7)
    np.testing.assert_allclose(second.predict(new), 1000 * first.predict(new) - 7, rtol=1e-4)


def test_penalty_pulls_terms_together() -> None:
    tried, new = drawn(32, 3, 0), drawn(50, 3, 1)
    losses = planted(*TWO, tried)
    one = laws.fit(tried, losses).predict(new)
    held = laws.fit(tried, losses, parts=3, penalty=1e3).predict(new)
    free = laws.fit(tried, losses, parts=3).predict(new)
    np.testing.assert_allclose(held, one, atol=1e-3)
    assert np.abs(free - one).max() > 0.02
    assert laws.usual_penalty(parts=3, domains=5, proxies=32) == pytest.approx(0.005 * (16 / 32) ** 2)


def test_penalty_prevents_overfit_of_several_terms() -> None:
    """32 noisy proxies, three terms where there are two: in some of eight draws a free fit is worse than none."""
    errors: dict[str, list[float]] = {"held": [], "free": []}
    penalties = {"held": laws.usual_penalty(parts=3, domains=4, proxies=32), "free": 0.0}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        law: Planted = (1.0, [0.5, 0.5], (1.5 * rng.normal(size=(2, 4))).tolist())
        tried, new = drawn(32, 4, 100 + seed), drawn(500, 4, 200 + seed)
        losses, true = planted(*law, tried) + rng.normal(scale=0.02, size=32), planted(*law, new)
        for name, penalty in penalties.items():
            found = laws.fit(tried, losses, parts=3, penalty=penalty, starts=4).predict(new)
            errors[name].append(float(np.mean((found - true) ** 2) / true.var()))
    assert max(errors["held"]) < 0.1
    assert max(errors["free"]) > 1


def test_equal_losses_give_a_flat_law() -> None:
    tried = drawn(8, 3, 0)
    np.testing.assert_allclose(laws.fit(tried, np.full(8, 2.5), parts=2).predict(tried), 2.5, atol=1e-6)


def test_invalid_arguments_raise() -> None:
    tried = drawn(8, 3, 0)
    with pytest.raises(ValueError, match="must be finite; leave out proxies that diverged"):
        laws.fit(tried, np.append(np.ones(7), np.inf))
    with pytest.raises(ValueError, match=r"got \(8, 3\) and \(7,\)"):
        laws.fit(tried, np.ones(7))
    with pytest.raises(ValueError, match="got 0, 16, 0.05 and 0.0"):
        laws.fit(tried, np.ones(8), parts=0)


# ------------------------------------------------------------------------------------------------ minimum


@pytest.mark.parametrize("most", [None, [0.5, 0.3, 0.9]])
def test_minimum_matches_fine_grid(most: list[float] | None) -> None:
    law = MixingLaw(TWO[0], np.log(TWO[1]), np.array(TWO[2]))
    found = laws.minimizer(law, None if most is None else np.array(most))
    a, b = np.meshgrid(*[np.linspace(0, 1, 1001)] * 2)
    grid = np.stack([a, b, 1 - a - b], axis=-1).reshape(-1, 3)
    high = np.ones(3) if most is None else np.array(most)
    grid = grid[((grid >= -1e-12) & (grid <= high + 1e-12)).all(axis=1)]
    values = planted(*TWO, grid)
    assert law.predict(found[None])[0] <= values.min() + 1e-9
    np.testing.assert_allclose(found, grid[np.argmin(values)], atol=2e-3)
    assert (found <= high + 1e-12).all()
    assert 0.1 < found[0] < 0.9  # the two parts want different domains
    assert 0.1 < found[1] < 0.9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(1, 4), st.floats(0.05, 5), st.booleans())
def test_minimum_is_optimal(seed: int, domains: int, parts: int, steep: float, bounded: bool) -> None:
    rng = np.random.default_rng(seed)
    law = MixingLaw(1.0, rng.normal(size=parts), steep * rng.normal(size=(parts, domains)))
    shares = rng.dirichlet(np.ones(domains))
    most = np.minimum(3 * shares, 1.0) if bounded else np.ones(domains)
    found = laws.minimizer(law, most)
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert (found >= 0).all()
    assert (found <= most + 1e-9).all()
    others = np.concatenate([drawn(2000, domains, seed), np.eye(domains), shares[None]])
    others = others[(others <= most).all(axis=1)]
    least = law.predict(found[None])[0] - law.constant
    assert least <= (law.predict(others) - law.constant).min() * (1 + 1e-3)


def test_minimum_of_one_term_is_a_corner() -> None:
    law = MixingLaw(2.0, np.zeros(1), np.array([[0.2, -1.0, 0.8]]))
    np.testing.assert_array_equal(laws.minimizer(law), [0, 1, 0])
    np.testing.assert_allclose(laws.minimizer(law, np.array([0.5, 0.6, 1.0])), [0.4, 0.6, 0.0])
    with pytest.raises(ValueError, match="sum to 1 or more"):
        laws.minimizer(law, np.array([0.2, 0.3, 0.4]))


# ------------------------------------------------------------------------------------------- whole search

NAMES = ("a", "b", "c", "d")


def task(seed: int = 0, rows: tuple[int, ...] = (100, 100, 100, 100), **options: object) -> MethodContext:
    sizes = dict(zip(NAMES, rows, strict=True))
    return MethodContext(
        domains=NAMES, rows=sizes, batch_rows=8, steps=640, seed=seed, options=MixingLawsOptions(**options)
    )


def search(one: MethodContext, law: Planted) -> np.ndarray:
    method = methods.find("mixing-laws")
    assert method.stages is not None
    stages = method.stages(one)
    trials = next(stages)
    assert trials == next(method.stages(one))
    weights = np.array([[trial.mixer["weights"].get(name, 0.0) for name in NAMES] for trial in trials])
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    ends = [Outcome("", float(loss), average={}) for loss in planted(*law, weights)]
    with pytest.raises(StopIteration) as end:
        stages.send(ends)
    assert end.value.value["method"] == "fixed"
    found = np.array([end.value.value["weights"][name] for name in NAMES])
    assert (found > 0).all()
    return found


def test_search_finds_minimum_of_planted_law() -> None:
    found = search(task(parts=2, penalty=0.0), FOUR_DOMAINS)
    everywhere = planted(*FOUR_DOMAINS, drawn(200_000, 4, 9))
    assert planted(*FOUR_DOMAINS, found[None])[0] < everywhere.min() + 1e-3
    usual = search(task(seed=1), FOUR_DOMAINS)
    even = planted(*FOUR_DOMAINS, np.full((1, 4), 0.25))[0]
    gained = even - planted(*FOUR_DOMAINS, usual[None])[0]
    assert gained > 0.9 * (even - everywhere.min())


def test_search_respects_repetition_limit() -> None:
    rows = (10, 330, 330, 330)  # the first domain is the best, and small
    found = search(task(rows=rows, repeats=8.0), FOUR_DOMAINS)
    assert found[0] == pytest.approx(8 * 0.01, rel=1e-3)


def test_mixtures_of_equal_domains_are_uniform_on_simplex() -> None:
    """Uniform on the simplex: each weight is below 1/2 in all but ``(1/2)^(m-1)`` of the mixtures."""
    found = mixtures.candidates(np.ones(3), 3000, np.random.default_rng(0), strengths=(3.0,))
    below = (found < 0.5).mean(axis=0)
    np.testing.assert_allclose(below, 0.75, atol=4 * np.sqrt(0.75 * 0.25 / 3000))


def test_requirements_and_cost() -> None:
    method = methods.find("mixing-laws")
    assert method.kind == "offline"
    assert method.needs.packages == ("scipy",)
    assert (method.needs.validation, method.needs.proxies) == (True, True)
    assert method.extra(task()).before == 640
