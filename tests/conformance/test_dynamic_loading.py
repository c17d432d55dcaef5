"""Dynamic batch loading by its published rule (Xia et al. 2023, Algorithm 1), and the reference before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.scripted_training import Script, names, play
from mixwell import methods
from mixwell.methods import MethodContext, Outcome, Recipe


def task(steps: int, horizon: int, **options: Any) -> MethodContext:
    chosen = methods.find("dynamic-loading").options.model_validate(options)
    return MethodContext(
        domains=tuple(names(3)),
        rows=dict.fromkeys(names(3), 100),
        batch_rows=12,
        steps=steps,
        horizon=horizon,
        options=chosen,
    )


def recipe(steps: int, horizon: int, **options: Any) -> Recipe:
    return methods.find("dynamic-loading").recipe(task(steps, horizon, **options))


def test_one_round_matches_hand_computation() -> None:
    # Behind by 1 and by 0 (the mean of 1 and -1, each cut at zero: 1/2), by nothing: exponents 1, 1/2, 0.
    script = Script(
        np.array([[2.0, 2.0, 1.0], [2.0, 1.0, 1.0]]), reference=np.array([[1.0, 1.0, 3.0], [1.0, 2.0, 3.0]])
    )
    made = recipe(2, 2)
    played = play(script, made.signal, made.update, horizon=2)
    expected = np.exp([1.0, 0.5, 0.0])
    np.testing.assert_allclose(played.weights[-1], expected / expected.sum(), rtol=1e-14)


@pytest.mark.parametrize("horizon", [1, 4])
def test_golden_trajectory(horizon: int) -> None:
    script = Script.random(3, steps=8)
    assert script.reference is not None
    made = recipe(8, horizon, step_size=0.7)
    played = play(script, made.signal, made.update, horizon=horizon)
    weights = np.full(3, 1 / 3)
    path = [weights]
    for begin in range(0, 8, horizon):
        behind = np.zeros(3)
        for t in range(begin, begin + horizon):
            for j in range(3):
                behind[j] += max(script.losses[t, j] - script.reference[t, j], 0.0) / horizon
        weights = weights * np.exp(0.7 * behind)
        weights = weights / weights.sum()
        path.append(weights)
    np.testing.assert_allclose(played.weights, path, rtol=1e-12)


def test_reference_is_trained_first() -> None:
    method = methods.find("dynamic-loading")
    assert method.stages is not None
    stages = method.stages(task(8, 4, reference_steps=5))
    [trial] = next(stages)
    assert (trial.name, trial.steps, trial.mixer["method"]) == ("reference", 5, "fixed")
    with pytest.raises(StopIteration) as end:
        stages.send([Outcome("there", 1.0, {})])
    assert end.value.value["options"]["reference"] == "there"
    assert method.extra(task(8, 4, reference_steps=5)).before == 5
    with pytest.raises(StopIteration) as end:
        next(method.stages(task(8, 4, reference="elsewhere")))
    assert end.value.value == {}
