"""Every estimator, update and optimizer through every shared contract."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import mixwell
from helpers.contract_tables import (
    BY_DOMAIN_ONLY,
    COUNTS_DOMAINS,
    ESTIMATORS,
    FORMS,
    LOOPS,
    NOT_PROJECTED,
    OPTIMIZERS,
    TRACED,
    UNKNOWN,
    UPDATES,
)
from helpers.toy_problems import Batch, names, regression_batches, two_layer
from mixwell.simplex.updates import RoundContext, Update
from mixwell.simplex.weights import Weights, normalize

SPLITTING = [
    pytest.param(
        name,
        marks=[pytest.mark.xfail(reason=COUNTS_DOMAINS[name], strict=True)] if name in COUNTS_DOMAINS else [],
    )
    for name in UPDATES
]


def final_weights(
    estimator: str,
    batches: list[dict[str, Batch]],
    validation: Batch,
    *,
    form: str = "by domain",
    weights: dict[str, float] | None = None,
    update: Update | None = None,
    constraints: Iterable[mixwell.Constraint] = (),
    optimizer: str = "momentum",
) -> dict[str, float]:
    model = two_layer(0)
    mixer = mixwell.Mixer(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        list(batches[0]),
        horizon=4,
        weights=weights,
        update=update or UPDATES["mirror"](),
        signal=ESTIMATORS[estimator](),
        constraints=tuple(constraints),
    )
    LOOPS[form](mixer, model, batches, validation)
    return mixer.weights.last


def close(expected: Any, estimator: str) -> Any:
    """Equal up to rounding; stochastic rounding draws its bits in the order of the domains."""
    return pytest.approx(expected, **({"abs": 2e-3} if estimator == "bfloat16" else {"rel": 1e-6}))


def concrete(base: type) -> set[type]:
    """All classes of the library below a base that can be made."""
    below = {kind for child in base.__subclasses__() for kind in (child, *concrete(child))}
    return {k for k in below if not inspect.isabstract(k) and k.__module__.startswith("mixwell.")}


def test_every_component_is_in_a_contract_table() -> None:
    estimators = {name: make() for name, make in ESTIMATORS.items()}
    made = [make() for make in UPDATES.values()]
    assert {type(one.traces) for one in estimators.values()} == concrete(mixwell.Traces)
    assert {type(one) for one in made} == concrete(Update)
    assert {name for name, one in estimators.items() if one.requirements.domain_batches} == BY_DOMAIN_ONLY


def assert_permuting_domains_permutes_the_result(
    estimator: str, form: str, *, update: str = "mirror", optimizer: str = "momentum"
) -> None:
    batches, validation = regression_batches(0, steps=8)
    straight, turned = (
        final_weights(
            estimator,
            [{name: step[name] for name in order} for step in batches],
            validation,
            form=form,
            update=UPDATES[update](),
            optimizer=optimizer,
        )
        for order in (["d0", "d1", "d2"], ["d2", "d0", "d1"])
    )
    assert turned == close(straight, estimator)
    assert max(straight.values()) > min(straight.values())


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("update", ["mirror", "self-tuned"])
@pytest.mark.parametrize(("estimator", "form"), FORMS)
def test_permuting_domains_permutes_the_result(
    estimator: str, form: str, update: str, optimizer: str
) -> None:
    assert_permuting_domains_permutes_the_result(estimator, form, update=update, optimizer=optimizer)


@pytest.mark.parametrize("form", LOOPS)
@pytest.mark.parametrize("update", UPDATES)
def test_permuting_domains_permutes_the_result_of_every_update(update: str, form: str) -> None:
    assert_permuting_domains_permutes_the_result("projected", form, update=update)


@pytest.mark.filterwarnings(UNKNOWN)
@pytest.mark.parametrize(("optimizer", "estimator"), TRACED)
def test_permuting_domains_permutes_the_result_of_every_optimizer(optimizer: str, estimator: str) -> None:
    assert_permuting_domains_permutes_the_result(estimator, "by domain", optimizer=optimizer)


@pytest.mark.parametrize("optimizer", sorted(NOT_PROJECTED))
def test_projected_traces_reject_elementwise_decay(optimizer: str) -> None:
    batches, validation = regression_batches(0, steps=1)
    with pytest.raises(ValueError, match="AdamW instead of Adam with weight decay; or use DenseTraces"):
        final_weights("projected", batches, validation, optimizer=optimizer)


def assert_a_duplicate_splits_the_gain(
    estimator: str, form: str, *, update: str = "mirror", optimizer: str = "momentum"
) -> None:
    batches, validation = regression_batches(1, steps=8)
    single, doubled = (
        final_weights(
            estimator,
            steps,
            validation,
            form=form,
            weights=start,
            update=UPDATES[update](),
            optimizer=optimizer,
        )
        for steps, start in (
            (batches, {"d0": 0.25, "d1": 0.5, "d2": 0.25}),
            (
                [{**step, "copy": step["d1"]} for step in batches],
                {"d0": 0.25, "d1": 0.25, "d2": 0.25, "copy": 0.25},
            ),
        )
    )
    assert abs(single["d1"] - 0.5) > 0.01
    assert doubled["d1"] == close(doubled["copy"], estimator)
    assert doubled["d1"] + doubled["copy"] == close(single["d1"], estimator)
    assert doubled["d0"] == close(single["d0"], estimator)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(("estimator", "form"), FORMS)
def test_duplicate_domain_splits_weight_gain(estimator: str, form: str, optimizer: str) -> None:
    assert_a_duplicate_splits_the_gain(estimator, form, optimizer=optimizer)


@pytest.mark.parametrize("update", SPLITTING)
def test_duplicate_domain_splits_gain_with_every_update(update: str) -> None:
    assert_a_duplicate_splits_the_gain("projected", "mixed batches", update=update)


@pytest.mark.parametrize("form", LOOPS)
@pytest.mark.parametrize("update", UPDATES)
def test_copies_of_a_domain_have_equal_weights_with_every_update(update: str, form: str) -> None:
    batches, validation = regression_batches(1, steps=8)
    doubled = [{**step, "copy": step["d1"]} for step in batches]
    found = final_weights("projected", doubled, validation, form=form, update=UPDATES[update]())
    assert found["copy"] == pytest.approx(found["d1"], rel=1e-6)
    assert found["copy"] != pytest.approx(found["d0"], rel=1e-6)


@pytest.mark.parametrize(("estimator", "form"), FORMS)
def test_single_domain_is_a_no_op(estimator: str, form: str) -> None:
    batches, validation = regression_batches(2, steps=8, domains=1)
    assert final_weights(estimator, batches, validation, form=form) == {"d0": 1.0}


@pytest.mark.parametrize("update", UPDATES)
def test_single_domain_is_a_no_op_with_every_update(update: str) -> None:
    batches, validation = regression_batches(2, steps=8, domains=1)
    assert final_weights("projected", batches, validation, update=UPDATES[update]()) == {"d0": 1.0}


@pytest.mark.parametrize(("estimator", "form"), FORMS)
def test_weights_stay_on_the_constrained_simplex(estimator: str, form: str) -> None:
    batches, validation = regression_batches(3, steps=12)
    found = final_weights(
        estimator,
        batches,
        validation,
        form=form,
        update=mixwell.MirrorDescent(1e6),
        constraints=[mixwell.Floor(0.05), mixwell.Cap(0.6)],
    )
    assert sum(found.values()) == pytest.approx(1)
    assert sorted(found.values()) == pytest.approx([0.05, 0.35, 0.6])


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_stays_on_the_constrained_simplex(update: str) -> None:
    """Bounds so narrow that every update meets both."""
    batches, validation = regression_batches(3, steps=40)
    found = final_weights(
        "projected without loss",
        batches,
        validation,
        update=UPDATES[update](),
        constraints=[mixwell.Floor(0.332), mixwell.Cap(0.3345)],
    )
    assert sum(found.values()) == pytest.approx(1)
    assert sorted(found.values()) == pytest.approx([0.332, 0.3335, 0.3345])


@pytest.mark.parametrize(("estimator", "form"), FORMS)
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000))
def test_same_seed_same_result(estimator: str, form: str, seed: int) -> None:
    batches, validation = regression_batches(seed, steps=4)
    first, second = (
        final_weights(estimator, batches, validation, form=form, update=mixwell.MirrorDescent("auto"))
        for _ in range(2)
    )
    assert first == second
    assert sum(first.values()) == pytest.approx(1)


# ----------------------------------------------------------------------------------------- updates alone


def scores_of(seed: int, m: int, rounds: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rounds, m))


def courses(update: Update, scores: Iterable[np.ndarray], *, first: int = 0, log: np.ndarray | None = None):
    """The log-weights after every round, from uniform weights."""
    found = list[np.ndarray]()
    for k, row in enumerate(scores, first):
        log = np.zeros(len(row)) if log is None else log
        log = normalize(update.step(log, row, RoundContext(k, 6, noise=np.full(len(row), 0.3)))[0])
        found.append(log)
    return np.array(found)


LARGEST = float(np.finfo(np.float64).max)


@pytest.mark.parametrize("update", UPDATES)
@given(st.data(), st.integers(1, 8))
def test_every_update_stays_on_simplex_for_finite_input(update: str, data, m: int) -> None:
    weights, made = Weights(names(m)), UPDATES[update]()
    for k in range(3):
        scores = data.draw(arrays(np.float64, m, elements=st.floats(-LARGEST, LARGEST)))
        log, alpha = made.step(weights.log, scores, RoundContext(k, 3))
        weights.advance(log, steps=1)
        assert np.isfinite(alpha)
        assert alpha >= 0
        assert np.isfinite(weights.log).all()
        assert (weights.values > 0).all()
        assert weights.values.sum() == pytest.approx(1)


@pytest.mark.parametrize("update", UPDATES)
@given(st.integers(0, 1000), st.integers(2, 6), st.floats(-1e3, 1e3))
def test_only_differences_of_scores_matter(update: str, seed: int, m: int, shift: float) -> None:
    scores = scores_of(seed, m, 4)
    found = courses(UPDATES[update](), scores + shift)
    np.testing.assert_allclose(found, courses(UPDATES[update](), scores), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("update", UPDATES)
@given(st.integers(0, 1000), st.integers(2, 6))
def test_lower_score_gains_among_equal_weights(update: str, seed: int, m: int) -> None:
    scores = scores_of(seed, m, 1)
    (log,) = courses(UPDATES[update](), scores)
    order = np.argsort(scores[0])
    assert (np.diff(log[order]) <= 0).all()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_every_update_continues_from_its_state(update: str, stop: int) -> None:
    scores = scores_of(0, 4, 6)
    undisturbed, first, second = (UPDATES[update]() for _ in range(3))
    whole = courses(undisturbed, scores)
    before = courses(first, scores[:stop])
    second.load_state(json.loads(json.dumps(first.state())))
    after = courses(second, scores[stop:], first=stop, log=before[-1] if stop else None)
    np.testing.assert_array_equal(after, whole[stop:])
    assert second.summary() == undisturbed.summary()


@pytest.mark.parametrize("update", UPDATES)
def test_reset_update_equals_new_update(update: str) -> None:
    scores, used = scores_of(0, 4, 6), UPDATES[update]()
    courses(used, scores_of(1, 4, 6))
    used.reset()
    np.testing.assert_array_equal(courses(used, scores), courses(UPDATES[update](), scores))


@given(st.floats(1e-6, 1e6), st.integers(2, 6))
def test_auto_step_size_is_invariant_to_loss_unit(scale: float, m: int) -> None:
    scores = np.random.default_rng(m).normal(size=(5, m))
    plain, scaled = mixwell.MirrorDescent("auto"), mixwell.MirrorDescent("auto")
    for k, row in enumerate(scores):
        a = plain.next_step_size(row, RoundContext(k, 5)) * row
        b = scaled.next_step_size(scale * row, RoundContext(k, 5)) * (scale * row)
        np.testing.assert_allclose(a, b, rtol=1e-9)
