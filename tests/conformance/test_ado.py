"""ADO by its published rule (Jiang et al. 2024): laws that are fitted online, slope x prior x credit, smoothed."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import mixwell
from helpers.scripted_training import Point, Script, names, play
from mixwell import methods
from mixwell.methods import Extra, MethodContext
from mixwell.signals.scaling_laws import PowerLaw, ScalingLaws, fit_power_law
from mixwell.simplex.updates import SoftmaxWeights

PRIOR = {"d0": 0.5, "d1": 0.3, "d2": 0.2}
MU = np.array([0.5, 0.3, 0.2])
PLANTED = ((2.0, 6.0, 0.4), (1.0, 4.0, 0.2), (0.5, 9.0, 0.6))


def law_losses(steps: int, planted=PLANTED):
    n = np.arange(1, steps + 1)[:, None]
    e, a, b = np.array(planted).T
    return e + a * n ** (-b)


# ------------------------------------------------------------------------------------------------- the fit


def huber_of_logs(irreducible, scale, exponent, n, losses, counts) -> float:
    away = np.abs(np.log(irreducible + scale * n ** (-exponent)) - np.log(losses))
    return float((counts * np.where(away < 1e-3, away**2 / 2, 1e-3 * (away - 5e-4))).sum())


def fitted_by_scipy(n, losses, counts):
    """L-BFGS on the logarithms from a grid of starts, as in the paper."""

    def objective(p) -> float:
        return huber_of_logs(np.exp(p[0]), np.exp(p[1]), p[2], n, losses, counts) / counts.sum() * 1e3

    starts = [(e, a, b) for e in (-1.0, 0.5) for a in (0.0, 2.0) for b in (0.2, 0.5)]
    bounds = [(-25, 10), (-25, 25), (0.05, 0.8)]
    ends = [minimize(objective, one, method="L-BFGS-B", bounds=bounds) for one in starts]
    best = min(ends, key=lambda end: end.fun).x
    polished = minimize(objective, best, method="Nelder-Mead", bounds=bounds, options={"maxiter": 4000})
    return np.exp(polished.x[0]), np.exp(polished.x[1]), polished.x[2]


@pytest.mark.parametrize("planted", [*PLANTED, (0.0, 3.0, 0.3), (3.0, 0.5, 0.1)])
@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_fit_recovers_planted_laws(planted, unit: float) -> None:
    n = unit * np.geomspace(5, 5000, 40)
    e, a, b = planted
    law = fit_power_law(n, e + a * n ** (-b), np.ones(40))
    assert law.exponent == pytest.approx(b, abs=2e-3)
    assert law.irreducible == pytest.approx(e, abs=2e-2)
    assert law.slope(n[-1]) == pytest.approx(a * b * n[-1] ** (-b - 1), rel=1e-2)


@pytest.mark.parametrize("seed", range(4))
def test_fit_matches_scipy(seed: int) -> None:
    random = np.random.default_rng(seed)
    e, a, b = random.uniform(0, 3), random.uniform(1, 10), random.uniform(0.1, 0.7)
    n, counts = np.geomspace(20, 4000, 50), random.integers(1, 40, 50).astype(float)
    losses = (e + a * n ** (-b)) * np.exp(random.normal(size=50) * 0.02)
    losses[::9] *= 1.3  # outliers
    law = fit_power_law(n, losses, counts)
    ours = huber_of_logs(law.irreducible, law.scale, law.exponent, n, losses, counts)
    theirs = huber_of_logs(*fitted_by_scipy(n, losses, counts), n, losses, counts)
    assert ours <= theirs * 1.001


def test_constant_losses_have_zero_slope() -> None:
    n = np.arange(1.0, 30.0)
    assert fit_power_law(n, np.linspace(1, 2, 29), np.ones(29)).slope(30.0) == 0
    assert fit_power_law(n, np.zeros(29), np.ones(29)) == PowerLaw(0.0, 0.0, 0.05)


def test_binned_fit_equals_fit_of_all_losses() -> None:
    """The signal keeps bins; scipy is given every loss of the run."""
    random = np.random.default_rng(3)
    losses = law_losses(1500) * np.exp(random.normal(size=(1500, 3)) * 0.02)
    signal = ScalingLaws(ignore=50)
    play(Script(losses), signal, SoftmaxWeights(), horizon=1500)
    n = np.arange(51, 1501).astype(float)
    for j, law in enumerate(signal.laws.values()):
        e, a, b = fitted_by_scipy(n, losses[50:, j], np.ones(1450))
        assert law.slope(1500.0) == pytest.approx(a * b * 1500 ** (-b - 1), rel=0.05)
        there = law.irreducible + law.scale * 1500**-law.exponent
        assert there == pytest.approx(e + a * 1500**-b, rel=2e-3)
        assert law.slope(1500.0) == pytest.approx(
            PLANTED[j][1] * PLANTED[j][2] * 1500 ** (-PLANTED[j][2] - 1), rel=0.15
        )


# ------------------------------------------------------------------------------------------------ the rule


class Published:
    """The rule, literally, one step at a time; the laws are handed in."""

    def __init__(self, prior, *, warmup: int = 0, spread: bool = False, s: float = 0.5) -> None:
        self.mu = np.array(prior)
        self.h, self.mean = self.mu.copy(), self.mu.copy()
        self.weights, self.t, self.spread, self.s = self.mu.copy(), warmup, spread, s

    def round(self, steps: int, laws, n):
        """The weights after a round, in which they are held; no laws leave them as they are."""
        for _ in range(steps):
            self.t += 1
            self.h = 0.9 * self.h + 0.1 * self.weights
        if not laws:
            return self.weights
        pairs = zip(laws, n, strict=True)
        slopes = np.array([law.exponent * law.scale / n_j ** (law.exponent + 1) for law, n_j in pairs])
        credit = self.h * (1 - self.h) if self.spread else self.h
        rho = self.mu * credit**self.s * slopes
        rho = rho / rho.sum()
        rho = np.maximum(rho, 0.01)
        rho = rho / rho.sum()
        new = 0.1 * rho + 0.9 * self.mean
        for t in range(self.t - steps + 1, self.t + 1):
            self.mean = (1 - 1 / t) * self.mean + rho / t
        self.weights = new
        return new


def mixer_of(signal: ScalingLaws, *, horizon: int, steps: int, **settings) -> tuple[Point, mixwell.Mixer]:
    model = Point(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = mixwell.Mixer(
        model,
        optimizer,
        names(3),
        budget=steps,
        horizon=horizon,
        signal=signal,
        update=SoftmaxWeights(),
        weights=MU.tolist(),
        **settings,
    )
    return model, mixer


def feed(model: Point, mixer: mixwell.Mixer, losses, *, counts=(1, 1, 1)):
    """Mixed batches; gives the laws after every round."""
    laws = []
    for step in losses:
        labels = np.repeat([0, 1, 2], counts)
        with mixer.batch(labels) as batch:
            batch.weighted_loss(torch.tensor(step[labels]) + 0 * model.theta.sum()).backward()
        mixer.step()
        if mixer.round_ended is not None:
            laws.append(mixer.signal.laws)
    return laws


@pytest.mark.parametrize("horizon", [1, 5])
@pytest.mark.parametrize("credit", ["share", "spread"])
@pytest.mark.parametrize("samples", ["all", "domain"])
def test_golden_trajectory(horizon: int, credit, samples) -> None:
    random = np.random.default_rng(0)
    losses = law_losses(60) * np.exp(random.normal(size=(60, 3)) * 0.01)
    signal = ScalingLaws(PRIOR, samples=samples, credit=credit, ignore=10, refit_every=5)
    model, mixer = mixer_of(signal, horizon=horizon, steps=60)
    laws = feed(model, mixer, losses, counts=(1, 4, 2))
    rule = Published(MU, spread=credit == "spread")
    seen = 0
    for k, found in enumerate(laws):
        assert len(found) in (0, 3)
        seen += len(found) == 3
        n = (k + 1) * horizon * np.array((1, 1, 1) if samples == "all" else (1, 4, 2))
        expected = rule.round(horizon, list(found.values()), n)
        np.testing.assert_allclose(mixer.weights.history[k + 1], expected, rtol=1e-11)
    assert seen * horizon >= 40  # laws came soon, so that something was compared
    assert np.abs(mixer.weights.history[-1] - MU).max() > 0.02


def test_weights_follow_slopes_of_planted_laws() -> None:
    """Without a word of the fit: the weights from the laws that were planted, in closed form."""
    losses = law_losses(400)
    model, mixer = mixer_of(ScalingLaws(PRIOR, ignore=20, refit_every=20), horizon=20, steps=400)
    laws = feed(model, mixer, losses)
    rule = Published(MU)
    for k, found in enumerate(laws):
        planted = [PowerLaw(*one) for one in PLANTED] if found else []
        expected = rule.round(20, planted, np.full(3, 20.0 * (k + 1)))
        np.testing.assert_allclose(mixer.weights.history[k + 1], expected, rtol=5e-3)
    assert [len(found) for found in laws[:3]] == [0, 3, 3]


def test_warmup_steps_are_counted() -> None:
    losses = law_losses(60)
    model, mixer = mixer_of(ScalingLaws(PRIOR, warmup=20), horizon=4, steps=60, warmup=20)
    laws = feed(model, mixer, losses)
    rule = Published(MU, warmup=20)
    for k, found in enumerate(laws):
        expected = rule.round(4, list(found.values()), np.full(3, 20 + 4.0 * (k + 1)))
        np.testing.assert_allclose(mixer.weights.history[k + 1], expected, rtol=1e-11)
    for (e, a, b), law in zip(PLANTED, laws[-1].values(), strict=True):
        assert law.slope(60.0) == pytest.approx(a * b * 60 ** (-b - 1), rel=0.02)
        assert law.irreducible == pytest.approx(e, abs=0.2)


def test_laws_are_refitted_at_interval() -> None:
    random = np.random.default_rng(0)
    losses = law_losses(30) * np.exp(random.normal(size=(30, 3)) * 0.01)
    model, mixer = mixer_of(ScalingLaws(PRIOR, ignore=4, refit_every=8), horizon=1, steps=30)
    laws = feed(model, mixer, losses)
    changed = [k + 1 for k in range(1, 30) if laws[k] != laws[k - 1]]
    assert changed == [12, 20, 28]
    assert not laws[10]


def test_domain_without_law_keeps_prior_weight() -> None:
    losses = law_losses(40)
    losses[:, 1] = np.nan
    signal = ScalingLaws(PRIOR, preference_share=1.0, floor=0.0)
    played = play(Script(losses), signal, SoftmaxWeights(), weights=MU.tolist())
    assert sorted(signal.laws) == ["d0", "d2"]
    np.testing.assert_allclose(played.weights[:, 1], 0.3, rtol=1e-12)
    assert abs(played.weights[-1, 0] - 0.5) > 0.02


def test_prior_is_used_if_no_loss_falls() -> None:
    losses = np.linspace(1, 2, 30)[:, None] + np.zeros(3)
    played = play(Script(losses), ScalingLaws(PRIOR), SoftmaxWeights(), weights=[1, 1, 1])
    np.testing.assert_allclose(played.weights[-1], MU, rtol=1e-6)


def test_zero_slope_gets_floor() -> None:
    losses = law_losses(60)
    losses[:, 2] = 1.0
    signal = ScalingLaws(PRIOR, preference_share=1.0)
    played = play(Script(losses), signal, SoftmaxWeights(), weights=MU.tolist())
    assert played.weights[-1, 2] == pytest.approx(0.01 / 1.01, rel=1e-6)


def test_initial_weights_are_default_prior() -> None:
    losses = law_losses(40)
    given, none = (
        play(Script(losses), signal, SoftmaxWeights(), weights=MU.tolist())
        for signal in (ScalingLaws(PRIOR), ScalingLaws())
    )
    np.testing.assert_allclose(none.weights, given.weights, rtol=1e-12)


@pytest.mark.parametrize("stop", [0, 3, 8, 21, 33])
@pytest.mark.parametrize("samples", ["all", "domain"])
def test_resume_is_bit_for_bit(stop: int, samples, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    losses = law_losses(40) * np.exp(random.normal(size=(40, 3)) * 0.01)

    def make() -> tuple[Point, mixwell.Mixer]:
        return mixer_of(ScalingLaws(PRIOR, samples=samples, refit_every=6), horizon=4, steps=40)

    model, whole = make()
    feed(model, whole, losses)
    model, first = make()
    feed(model, first, losses[:stop])
    first.save(tmp_path / "state")
    kept = copy.deepcopy(model.state_dict())
    model, resumed = make()
    model.load_state_dict(kept)
    resumed.load(tmp_path / "state")
    feed(model, resumed, losses[stop:])
    np.testing.assert_array_equal(resumed.weights.log, whole.weights.log)
    assert resumed.rounds == whole.rounds
    assert resumed.signal.laws == whole.signal.laws
    assert len(resumed.signal.laws) == 3


def test_memory_does_not_grow() -> None:
    model, mixer = mixer_of(ScalingLaws(refit_every=10**6), horizon=10, steps=300)
    before = mixer.signal.nbytes
    feed(model, mixer, law_losses(300))
    assert mixer.signal.nbytes == before
    assert 3 * 3000 < before < 3 * 10_000


def test_negative_loss_raises() -> None:
    model, mixer = mixer_of(ScalingLaws(), horizon=1, steps=3)
    with pytest.raises(ValueError, match=r"not negative, got \{'d1': -1\.0\}"):
        feed(model, mixer, np.array([[1.0, -1.0, 1.0]]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"credit_power": -1}, "credit_power must be finite and not negative, got -1"),
        ({"credit_rate": 0}, r"credit_rate must be in \(0, 1\], got 0"),
        ({"preference_share": 2}, r"preference_share must be in \(0, 1\], got 2"),
        ({"refit_every": 0}, "refit_every must be at least 1, got 0"),
        ({"ignore": -1}, "ignore must be at least 0, got -1"),
        ({"samples": "some"}, "samples must be 'all' or 'domain', got 'some'"),
        ({"credit": "all"}, "credit must be 'share' or 'spread', got 'all'"),
        ({"prior": {"d0": 0.0}}, r"must be positive and finite, got \{'d0': 0\.0\}"),
    ],
)
def test_invalid_arguments_raise(settings, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ScalingLaws(**settings)


def test_prior_of_other_domains_raises() -> None:
    with pytest.raises(ValueError, match=r"must name every domain once \(d0, d1, d2\); it names web"):
        mixer_of(ScalingLaws({"web": 1.0}), horizon=1, steps=3)


# ---------------------------------------------------------------------------------------------- the method


def task(**options) -> MethodContext:
    method = methods.find("ado")
    rows = {"d0": 50, "d1": 30, "d2": 20}
    return MethodContext(
        domains=tuple(rows), rows=rows, batch_rows=8, steps=240, options=method.options(**options)
    )


def test_method_starts_with_row_prior_and_follows_rule() -> None:
    method = methods.find("ado")
    assert method.horizon is not None
    recipe = method.recipe(task())
    assert recipe.weights == {"d0": 50.0, "d1": 30.0, "d2": 20.0}
    signal = recipe.signal
    assert isinstance(signal, ScalingLaws)
    assert (signal.ignore, signal.refit_every, signal.floor, signal.samples) == (4, 4, 0.01, "all")
    model, mixer = mixer_of(signal, horizon=method.horizon(240), steps=240)
    laws = feed(model, mixer, law_losses(240)[:40])
    rule = Published(MU)
    for k, found in enumerate(laws):
        expected = rule.round(1, list(found.values()), np.full(3, k + 1.0))
        np.testing.assert_allclose(mixer.weights.history[k + 1], expected, rtol=1e-11)
    assert method.extra(task()) == Extra()
    assert not method.needs.validation


def test_method_with_configured_weights() -> None:
    recipe = methods.find("ado").recipe(task(prior="weights", ignore=7, refit_every=9, credit="spread"))
    assert recipe.weights is None
    assert isinstance(recipe.signal, ScalingLaws)
    assert (recipe.signal.prior, recipe.signal.ignore, recipe.signal.refit_every) == (None, 7, 9)
    assert recipe.signal.credit == "spread"
