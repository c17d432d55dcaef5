"""RegMix: its mixtures, its regressions on the runs that its authors published, and the whole search."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import spearmanr

import mixwell
from mixwell import methods
from mixwell.methods import MethodContext, Outcome, Trial
from mixwell.methods.regmix import RegMixOptions
from mixwell.methods.search import mixtures, regression
from mixwell.methods.search.regression import Model

EXTRACT = Path(__file__).parents[1] / "data" / "regmix_extract.csv"
MODELS: tuple[Model, ...] = ("linear", "log-linear", "lightgbm")

# ---------------------------------------------------------------------------------------------- mixtures


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.02, 1.0), min_size=2, max_size=9), st.integers(0, 2**63 - 1))
def test_mixtures_are_distinct_and_limit_repetition(sizes: list[float], seed: int) -> None:
    shares = np.array(sizes) / sum(sizes)
    found = mixtures.candidates(np.array(sizes), 16, np.random.default_rng(seed))
    assert found.shape == (16, len(sizes))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
    assert (found[found > 0] >= 2e-4).all()
    lost = len(sizes) * 2e-4  # what was set to zero goes to the others
    assert (found <= 15 * shares / (1 - lost) + 1e-12).all()
    apart = np.abs(found[:, None] - found[None]).max(axis=-1)
    assert apart[~np.eye(16, dtype=bool)].min() > 0
    again = mixtures.candidates(np.array(sizes), 16, np.random.default_rng(seed))
    assert np.array_equal(found, again)


def test_mixtures_follow_dirichlet_distribution() -> None:
    """One strength, no rejection: mean ``p_j`` and variance ``p_j (1 - p_j)/(s + 1)`` for ``p ~ sqrt(share)``."""
    shares, count = np.array([0.64, 0.32, 0.04]), 4000
    rng = np.random.default_rng(0)
    found = mixtures.candidates(shares, count, rng, strengths=(5.0,), repeats=1e9, least=1e-6)
    prior = np.sqrt(shares) / np.sqrt(shares).sum()
    variance = prior * (1 - prior) / 6
    np.testing.assert_allclose(found.mean(axis=0), prior, atol=4 * np.sqrt(variance.max() / count))
    np.testing.assert_allclose(found.var(axis=0), variance, rtol=0.1)


def test_strengths_range_from_one_domain_to_all() -> None:
    assert len(mixtures.STRENGTHS) == 15
    assert (mixtures.STRENGTHS[0], mixtures.STRENGTHS[-1]) == (pytest.approx(0.1), pytest.approx(5))
    steps = np.diff(np.log(mixtures.STRENGTHS))
    np.testing.assert_allclose(steps, steps[0])
    found = mixtures.candidates(np.ones(6), 200, np.random.default_rng(0))
    assert (found.max(axis=1) > 0.9).any()
    assert (found.max(axis=1) < 0.4).any()
    assert ((found == 0).sum(axis=1) >= 3).any()


def test_impossible_sampling_raises() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(
        ValueError, match=r"only \d+ different mixtures of 2 domains were found, 40 are wanted"
    ):
        mixtures.candidates(np.array([0.9999, 0.0001]), 40, rng)
    with pytest.raises(ValueError, match=r"must be positive and finite, got \[1.0, 0.0\]"):
        mixtures.candidates(np.array([1.0, 0.0]), 4, rng)
    with pytest.raises(ValueError, match=r"between 0 and 1/2, got 15.0 and 0.6"):
        mixtures.candidates(np.ones(2), 4, rng, least=0.6)


# ------------------------------------------------------------------------------- the authors' own proxies


def read_extract() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    with EXTRACT.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    train, test = (np.array([row[1:] for row in rows if row[0] == kind], float) for kind in ("train", "test"))
    return train[:, :-1], train[:, -1], test[:, :-1], test[:, -1]


def read_whole() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data" / "regmix"
    folder = Path(os.environ.get("MIXWELL_REGMIX_DATA") or beside)
    if not (folder / "train_mixture_1m.csv").exists():
        pytest.skip("RegMix's published runs are not here; MIXWELL_REGMIX_DATA names their folder")

    def table(name: str) -> tuple[list[str], np.ndarray]:
        with (folder / f"{name}_1m.csv").open(newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        return head, np.array(rows, float)

    found: list[np.ndarray] = []
    for kind in ("train", "test"):
        weights, (head, losses) = table(f"{kind}_mixture")[1], table(f"{kind}_pile_loss")
        assert np.array_equal(weights[:, 0], losses[:, 0])
        found += [weights[:, 1:], losses[:, head.index("metric/the_pile_pile_cc_val_loss")]]
    return found[0], found[1], found[2], found[3]


def least_squares(train: np.ndarray, losses: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Ordinary least squares with an intercept."""
    solution = np.linalg.lstsq(np.insert(train, 0, 1, axis=1), losses, rcond=None)[0]
    return solution[0] + test @ solution[1:]


def ridge(train: np.ndarray, losses: np.ndarray, test: np.ndarray, *, intercept: float) -> np.ndarray:
    """Ridge regression on ``[1, w, log(w + 1e-3)]`` as least squares with further rows: 1e-2 for the coefficients,
    ``intercept`` for the first column."""

    def columns(w: np.ndarray) -> np.ndarray:
        return np.hstack([np.ones((len(w), 1)), w, np.log(w + 1e-3)])

    size = 2 * train.shape[1] + 1
    further = np.diag(np.sqrt([intercept] + [1e-2] * (size - 1)))
    stacked = np.vstack([columns(train), further])
    return columns(test) @ np.linalg.lstsq(stacked, np.append(losses, np.zeros(size)), rcond=None)[0]


def rank(predicted: np.ndarray, losses: np.ndarray) -> float:
    return float(spearmanr(predicted, losses)[0])


def test_models_on_subset_of_published_proxies() -> None:
    train, losses, test, true = read_extract()
    assert (train.shape, test.shape) == ((96, 17), (48, 17))
    linear, log_linear, trees = (regression.fit(model, train, losses)(test) for model in MODELS)
    np.testing.assert_allclose(linear, least_squares(train, losses, test), rtol=1e-9)
    np.testing.assert_allclose(log_linear, ridge(train, losses, test, intercept=0.0), rtol=1e-8)
    assert rank(linear, true) == pytest.approx(0.9129, abs=5e-5)
    assert rank(log_linear, true) == pytest.approx(0.9751, abs=5e-5)
    assert rank(trees, true) > 0.93
    assert np.mean((trees - true) ** 2) < 0.2 * true.var()


def test_models_on_all_published_proxies() -> None:
    train, losses, test, true = read_whole()
    assert (len(train), len(test)) == (512, 256)
    linear, log_linear, trees = (regression.fit(model, train, losses)(test) for model in MODELS)
    assert rank(linear, true) == pytest.approx(0.9021, abs=5e-5)
    assert np.mean((linear - true) ** 2) == pytest.approx(0.0235, abs=5e-5)
    # The reference shrinks the intercept too, which makes a fit depend on where zero is; ours does not.
    assert rank(ridge(train, losses, test, intercept=1e-2), true) == pytest.approx(0.9829, abs=5e-5)
    assert rank(log_linear, true) == pytest.approx(0.9829, abs=2e-4)
    assert 0.98 <= rank(trees, true) <= 0.995


def test_auto_model_depends_on_number_of_proxies() -> None:
    """What `auto` rests on."""
    train, losses, test, true = read_whole()
    few = regression.ENOUGH_FOR_TREES // 2
    log_linear, trees = (regression.fit(model, train[:few], losses[:few])(test) for model in MODELS[1:])
    assert rank(log_linear, true) > rank(trees, true)
    log_linear, trees = (regression.fit(model, train, losses)(test) for model in MODELS[1:])
    assert rank(trees, true) > rank(log_linear, true)
    assert [regression.chosen("auto", n) for n in (few, 2 * few)] == ["log-linear", "lightgbm"]
    assert regression.chosen("linear", 512) == "linear"


@pytest.mark.parametrize("model", MODELS)
def test_choice_is_invariant_to_loss_offset(model: Model) -> None:
    train, losses, test, _ = read_extract()
    first, second = regression.fit(model, train, losses)(test), regression.fit(model, train, losses + 8)(test)
    np.testing.assert_allclose(second, first + 8, atol=1e-3 if model == "lightgbm" else 1e-8)
    assert np.array_equal(regression.fit(model, train, losses, seed=3)(test), first) or model == "lightgbm"
    assert np.array_equal(regression.fit(model, train, losses)(test), first)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("proxies", [4, 9, 16])
def test_few_proxies_rank_good_above_bad(model: Model, proxies: int) -> None:
    good = np.linspace(0, 1, proxies)
    weights = np.stack([good, 1 - good], axis=1)
    predicted = regression.fit(model, weights, 3 - good)(np.array([[0.05, 0.95], [0.95, 0.05]]))
    assert predicted[0] > predicted[1] + 0.2


def test_nonfinite_losses_raise() -> None:
    with pytest.raises(ValueError, match="must be finite; leave out proxies that diverged"):
        regression.fit("linear", np.eye(2), np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match=r"got \(2, 2\) and \(3,\)"):
        regression.fit("linear", np.eye(2), np.ones(3))


# ---------------------------------------------------------------------------------------------- proposals


def test_result_averages_best_samples() -> None:
    samples = np.array([[1.0, 0.0], [0.8, 0.2], [0.6, 0.4], [0.0, 1.0]])
    found = regression.best_average(lambda w: np.abs(w[:, 0] - 0.75), samples, 2)
    np.testing.assert_allclose(found, [0.7, 0.3])
    with pytest.raises(ValueError, match="predicts 2 for every mixture"):
        regression.best_average(lambda w: np.full(len(w), 2.0), samples, 2)
    with pytest.raises(ValueError, match="between 1 and the 4 samples, got 5"):
        regression.best_average(lambda w: w[:, 0], samples, 5)


def test_result_has_no_zero_weights() -> None:
    found = mixtures.keep_mixture(["a", "b"], np.array([1.0, 0.0]))
    assert (found["method"], found["options"]) == ("fixed", {})
    assert found["weights"]["b"] == pytest.approx(1e-6, rel=1e-5)
    assert sum(found["weights"].values()) == pytest.approx(1, abs=1e-15)


# ------------------------------------------------------------------------------------------- whole search

DOMAINS = ("web", "code", "noise")
CENTRES = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-3.0, -3.0]], dtype=torch.float64)
WANTED = torch.tensor([1.4, 0.6], dtype=torch.float64)
BEST = np.array([0.7, 0.3, 0.0])
"""Training ends at the weighted mean of the centers, which is what is wanted for these weights alone."""


def task(seed: int = 0, steps: int = 3200, **options: object) -> MethodContext:
    rows = {"web": 300, "code": 600, "noise": 900}
    return MethodContext(
        domains=DOMAINS, rows=rows, batch_rows=8, steps=steps, seed=seed, options=RegMixOptions(**options)
    )


def trained(trial: Trial) -> float:
    """The validation loss of a real run with a trial's weights: domains are quadratics around their centers."""
    assert trial.mixer["method"] == "fixed"
    assert trial.mixer["options"] == {}
    assert trial.domains == tuple(trial.mixer["weights"])
    model = torch.nn.Linear(1, 2, bias=False).double()
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        list(trial.domains),
        budget=trial.steps,
        horizon=trial.steps,
        signal=mixwell.ConstantWeights(),
        update=1.0,
        weights=trial.mixer["weights"],
    )
    assert trial.domains is not None
    for _ in range(trial.steps):
        for name in trial.domains:
            with mixer.domain(name):
                ((model.weight[:, 0] - CENTRES[DOMAINS.index(name)]) ** 2).sum().div(2).backward()
        mixer.step()
    return float(((model.weight[:, 0].detach() - WANTED) ** 2).sum() / 2)


def outcomes(trials: Sequence[Trial]) -> list[Outcome]:
    return [Outcome(one.name, trained(one), average=one.mixer["weights"]) for one in trials]


def test_search_finds_nearly_best_mixture() -> None:
    method = methods.find("regmix")
    assert method.stages is not None
    stages = method.stages(task())
    trials = next(stages)
    assert len(trials) == 32
    assert {one.steps for one in trials} == {100}
    assert len({one.name for one in trials}) == 32
    assert any(len(one.domains or ()) < 3 for one in trials)  # zeros are left out
    with pytest.raises(StopIteration) as end:
        stages.send(outcomes(trials))
    found = end.value.value
    assert found["method"] == "fixed"
    weights = np.array([found["weights"][name] for name in DOMAINS])
    assert (weights > 0).all()
    assert weights.sum() == pytest.approx(1)
    shares = np.array([1, 2, 3]) / 6

    def loss(w: np.ndarray) -> float:
        return float(((torch.tensor(w) @ CENTRES - WANTED) ** 2).sum() / 2)

    assert loss(BEST) == pytest.approx(0, abs=1e-12)
    assert loss(weights) < 0.1 * min(loss(shares), loss(np.ones(3) / 3))
    np.testing.assert_allclose(weights, BEST, atol=0.2)


def test_trials_are_deterministic() -> None:
    def trials(seed: int) -> Sequence[Trial]:
        method = methods.find("regmix")
        assert method.stages is not None
        return next(method.stages(task(seed, proxies=6, proxy_steps=5, proxy_model={"width": 8})))

    assert trials(3) == trials(3)
    assert trials(3) != trials(4)
    assert all((one.steps, one.model) == (5, {"width": 8}) for one in trials(3))


def test_diverged_proxy_is_named() -> None:
    method = methods.find("regmix")
    assert method.stages is not None
    stages = method.stages(task(proxies=4))
    trials = next(stages)
    ends = [Outcome("", 1.0 + k, average={}) for k in range(4)]
    ends[2] = Outcome("", float("nan"), average={})
    with pytest.raises(ValueError, match=rf"1 of 4 proxies are not finite \({trials[2].name}: nan\)"):
        stages.send(ends)


def test_missing_package_raises_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    method = methods.find("regmix")
    assert method.stages is not None
    with pytest.raises(ValueError, match=r"pip install 'mixwell\[search\]'"):
        next(method.stages(task(model="lightgbm")))
    with pytest.raises(ValueError, match="set model to log-linear"):
        next(method.stages(task(proxies=128)))
    assert len(next(method.stages(task()))) == 32


def test_requirements_and_cost() -> None:
    method = methods.find("regmix")
    assert (method.kind, method.needs.validation, method.needs.proxies) == ("offline", True, True)
    assert method.extra(task()).before == 3200
    assert method.extra(task(proxies=10, proxy_steps=7)).before == 70
    assert method.extra(task(steps=3)).before == 32  # a step each at least
    with pytest.raises(ValidationError, match=r"top must be at most samples \(100\), got 128"):
        RegMixOptions(samples=100)


def test_listing_offline_methods_imports_nothing_heavy() -> None:
    names = "mixwell.methods.regmix, mixwell.methods.mixing_laws, mixwell.methods.unimax"
    code = f"import {names}, sys; print(*(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "scipy", "lightgbm"} & set(done.stdout.split())
