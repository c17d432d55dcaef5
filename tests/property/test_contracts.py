"""Every estimator through every shared contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mixwell
from mixwell import Hypergradient
from problems import Batch, regression_batches, train, two_layer

ESTIMATORS = {
    "default": Hypergradient,
    "every step": lambda: Hypergradient(0.3, points=8, span=1.0),
    "last iterate": lambda: Hypergradient(0.3, points=1),
    "isotropic": lambda: Hypergradient(0.3),
    "projected": lambda: Hypergradient(0.3, mixwell.ProjectedTraces(64)),
    "per-tensor": lambda: Hypergradient(mixwell.PerTensorCurvature({"0.weight": 0.5}, default=0.1)),
    "diagonal": lambda: Hypergradient(mixwell.DiagonalCurvature({"2.bias": torch.ones(4)})),
    "exact": lambda: Hypergradient(mixwell.ExactCurvature()),
    "carried": lambda: Hypergradient(0.3, mixwell.CarriedTraces()),
    "sketched": lambda: Hypergradient(0.3, mixwell.SketchedTraces(64)),
    "subset": lambda: Hypergradient(0.3, mixwell.SubsetTraces(["2.*"])),
    "audited": lambda: Hypergradient(0.3, mixwell.AuditedTraces(mixwell.SubsetTraces(["2.*"]))),
    "bfloat16": lambda: Hypergradient(0.3, mixwell.BFloat16Traces()),
}
UPDATES = {"fixed": lambda: mixwell.MirrorDescent(2.0), "self-tuned": mixwell.SelfTunedMirrorDescent}


def final_weights(
    estimator: str,
    batches: list[dict[str, Batch]],
    validation: Batch,
    *,
    weights: dict[str, float] | None = None,
    update=None,
    constraints=(),
    adam: bool = False,
) -> dict[str, float]:
    model = two_layer(0)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if adam
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    )
    mixer = mixwell.Mixer(
        model,
        optimizer,
        list(batches[0]),
        horizon=4,
        weights=weights,
        update=update or mixwell.MirrorDescent(2.0),
        signal=ESTIMATORS[estimator](),
        constraints=constraints,
    )
    train(mixer, model, batches, validation)
    return mixer.weights.last


# Stochastic rounding draws its bits in the order of the domains.
TOLERANCE = {"bfloat16": 0.02}


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_permuting_domains_permutes_the_result(estimator: str, update: str, adam: bool) -> None:
    batches, validation = regression_batches(0, steps=8)
    straight = final_weights(estimator, batches, validation, update=UPDATES[update](), adam=adam)
    order = ["d2", "d0", "d1"]
    turned = final_weights(
        estimator,
        [{name: step[name] for name in order} for step in batches],
        validation,
        update=UPDATES[update](),
        adam=adam,
    )
    assert turned == pytest.approx(straight, rel=TOLERANCE.get(estimator, 1e-6))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_duplicate_domain_splits_its_weights_gain(estimator: str) -> None:
    batches, validation = regression_batches(1, steps=8)
    start = {"d0": 0.25, "d1": 0.5, "d2": 0.25}
    single = final_weights(estimator, batches, validation, weights=start)
    doubled = final_weights(
        estimator,
        [{**step, "copy": step["d1"]} for step in batches],
        validation,
        weights={"d0": 0.25, "d1": 0.25, "d2": 0.25, "copy": 0.25},
    )
    tolerance = TOLERANCE.get(estimator, 1e-6)
    assert doubled["d1"] == pytest.approx(doubled["copy"], rel=tolerance)
    assert doubled["d1"] + doubled["copy"] == pytest.approx(single["d1"], rel=tolerance)
    assert doubled["d0"] == pytest.approx(single["d0"], rel=tolerance)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_domain_is_a_no_op(estimator: str) -> None:
    batches, validation = regression_batches(2, steps=8, domains=1)
    assert final_weights(estimator, batches, validation) == {"d0": 1.0}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_stay_on_the_constrained_simplex(estimator: str) -> None:
    batches, validation = regression_batches(3, steps=12)
    found = final_weights(
        estimator,
        batches,
        validation,
        update=mixwell.MirrorDescent(1e6),
        constraints=[mixwell.Floor(0.05), mixwell.Cap(0.6)],
    )
    assert sum(found.values()) == pytest.approx(1)
    assert sorted(found.values()) == pytest.approx([0.05, 0.35, 0.6])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_same_seed_same_result(estimator: str, seed: int) -> None:
    batches, validation = regression_batches(seed, steps=4)
    first, second = (
        final_weights(estimator, batches, validation, update=mixwell.SelfTunedMirrorDescent())
        for _ in range(2)
    )
    assert first == second
    assert sum(first.values()) == pytest.approx(1)


@given(st.floats(1e-6, 1e6), st.integers(2, 6))
def test_the_unit_of_the_validation_loss_does_not_matter_to_the_self_tuned_step(scale: float, m: int) -> None:
    scores = np.random.default_rng(m).normal(size=(5, m))
    plain, scaled = mixwell.SelfTunedMirrorDescent(), mixwell.SelfTunedMirrorDescent()
    for k, row in enumerate(scores):
        a = plain.step_size(row, round_index=k, rounds=5) * row
        b = scaled.step_size(scale * row, round_index=k, rounds=5) * (scale * row)
        np.testing.assert_allclose(a, b, rtol=1e-9)
