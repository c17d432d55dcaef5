"""What every method promises, run for real on a small problem."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.method_runs import BATCH, ROWS, STEPS, data, online, run_of
from mixwell import methods
from mixwell.lab.compare import budgets
from mixwell.methods import base
from mixwell.training import config_io, mixture_file

METHODS = list(methods.every())
ONLINE = [name for name, method in methods.every().items() if method.has_rounds]
"""In the run itself, or in a proxy, whose rule is then tried in a run."""


@pytest.mark.parametrize("name", METHODS)
def test_trains_to_end_at_planned_cost(name: str, tmp_path: Path) -> None:
    done = run_of(tmp_path / "run", name).start()
    history = done.mixer.weights.history
    assert done.steps_done == STEPS
    assert np.isfinite(history).all()
    assert (history >= 0).all()
    assert history.sum(axis=1) == pytest.approx(1.0)
    found = mixture_file.read_mixture(tmp_path / "run")
    assert found["method"] == name
    size = sum(p.nbytes for p in done.model.parameters())
    if name == "dynamic-loading":
        assert size <= found["memory"] < 2 * size  # the reference model, and a few numbers
    assert found["finished"]
    told = budgets.cost(config_io.read_config(tmp_path / "run" / "config.yaml"), ROWS, 48)
    computed = found["rows"]["computed"] / BATCH
    # Conjugate gradients stop where the Hessian is not positive definite.
    assert computed <= told if name == "implicit-cg" else computed == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize("name", ONLINE)
def test_runs_with_any_horizon(name: str, tmp_path: Path) -> None:
    done = run_of(tmp_path / "greedy", name, horizon=1, options=online(name)).start()
    assert [record.steps for record in done.mixer.rounds] == [1] * STEPS
    done = run_of(tmp_path / "long", name, horizon=5, options=online(name)).start()
    assert [record.steps for record in done.mixer.rounds] == [5, 7]


@pytest.mark.parametrize("name", METHODS)
def test_resume_in_mid_round_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole = run_of(tmp_path / "whole", name, horizon=5, options=online(name)).start()
    for stop in (8, 3):
        asked = itertools.count()
        begun = run_of(
            tmp_path / f"parts-{stop}",
            name,
            horizon=5,
            options=online(name),
            stopping=lambda asked=asked, stop=stop: next(asked) >= stop,
        )
        with pytest.raises(InterruptedError, match="stopped"):
            begun.start()
        rest = run_of(tmp_path / f"parts-{stop}", name, horizon=5, options=online(name)).resume()
        assert rest.mixer.weights.history.tolist() == whole.mixer.weights.history.tolist()
        for one, other in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)


# It trains on other rows in each of its trials, which come in the order of the domains.
TOLERANCE = {"aioli": 0.02}


@pytest.mark.parametrize(
    "name", [name for name in ONLINE if name != "tikmix-m"]
)  # draws candidates at random
def test_permuting_domains_permutes_the_weights(name: str, tmp_path: Path) -> None:
    straight = run_of(tmp_path / "straight", name, horizon=4, options=online(name)).start()
    turned = run_of(tmp_path / "turned", name, horizon=4, order="cab", options=online(name)).start()
    assert turned.mixer.weights.last == pytest.approx(
        straight.mixer.weights.last, abs=TOLERANCE.get(name, 1e-3)
    )


# Trials come one after the other, each from where the last one ended; batches are split by chance.
APART = {"aioli": 0.05, "pike": 0.005, "pike-balanced": 0.005}


@pytest.mark.parametrize("name", [name for name in ONLINE if name != "tikmix-m"])
def test_duplicate_domains_get_equal_weights(name: str, tmp_path: Path) -> None:
    """All four rows of every domain are in every step; a and b are the same, so they have the same gradients."""
    whole = data()
    few = {key: (inputs[:4], labels[:4]) for key, (inputs, labels) in whole.items()}
    rows = {**few, "b": few["a"], "validation": whole["validation"]}
    done = run_of(tmp_path, name, horizon=3, rows=rows, counts="equal", options=online(name)).start()
    history = done.mixer.weights.history
    assert len(history) > 3
    np.testing.assert_allclose(history[:, 0], history[:, 1], atol=APART.get(name, 1e-5))


@pytest.mark.parametrize("name", METHODS)
def test_single_domain_raises_or_keeps_weight(name: str, tmp_path: Path) -> None:
    if methods.find(name).needs.domains > 1:
        with pytest.raises(ValueError, match=f"{name} needs 2 domains or more, and there is 1"):
            run_of(tmp_path / "run", name, order="a")
    else:
        assert run_of(tmp_path / "run", name, order="a").start().mixer.weights.last == {"a": 1.0}


@pytest.mark.parametrize("name", METHODS)
def test_missing_validation_set_raises(name: str, tmp_path: Path) -> None:
    rows = data()
    del rows["validation"]
    if methods.find(name).needs.validation:
        with pytest.raises(ValueError, match=f"{name} needs a validation set, and there is none"):
            run_of(tmp_path / "run", name, rows=rows)
    else:
        assert run_of(tmp_path / "run", name, rows=rows).start().finished


@pytest.mark.parametrize("name", [name for name in METHODS if methods.find(name).needs.row_losses])
def test_missing_row_losses_raise(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} weighs every row, so it needs the loss of every row"):
        run_of(tmp_path / "run", name, knows_rows=False).start()
    assert not list(tmp_path.iterdir())


def test_missing_reference_raises_before_training(tmp_path: Path) -> None:
    options = {"reference": str(tmp_path / "nowhere"), "transfer": False}
    with pytest.raises(ValueError, match="nowhere is not the directory of a run with a checkpoint"):
        run_of(tmp_path / "run", "doremi", options=options).start()


def test_missing_package_raises_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tikmix-d needs scipy, which is not installed: pip install"):
        run_of(tmp_path / "run", "tikmix-d").start()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("doge", {"target": "domains"}),
        ("skill-it", {"targets": "domains", "probe_steps": 2}),
        ("aioli", {"targets": "domains"}),
    ],
)
def test_target_domains_needs_no_validation_set(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    rows = data()
    del rows["validation"]
    done = run_of(tmp_path / "run", name, rows=rows, options=options | online(name), horizon=3).start()
    assert len(done.mixer.rounds) == 4


def test_exact_truncated_products_are_charged(tmp_path: Path) -> None:
    """Two steps of each of four rounds take a product with each of three traces, two gradients each.

    The validation gradient of a round of three steps is of one batch.
    """
    options = {"curvature": "exact", "window": 2}
    run_of(tmp_path / "run", "truncated", horizon=3, options=options).start()
    config = config_io.read_config(tmp_path / "run" / "config.yaml")
    computed = mixture_file.read_mixture(tmp_path / "run")["rows"]["computed"] / BATCH
    assert computed == pytest.approx(budgets.cost(config, ROWS, 48))
    assert computed == pytest.approx(STEPS + 4 * 1 + 4 * 2 * 3 * 2)


def test_excess_objective_with_mean_loss_only(tmp_path: Path) -> None:
    ends = {
        objective: run_of(
            tmp_path / objective,
            "doremi",
            options={"transfer": False, "objective": objective},
            knows_rows=False,
        ).start()
        for objective in ("losses", "excess")
    }
    one, other = (next(iter(done.model.parameters())) for done in ends.values())
    assert not torch.equal(one, other)


def test_trials_of_other_settings_are_not_reused(tmp_path: Path) -> None:
    run_of(tmp_path / "run", "doremi").start()
    for path in (tmp_path / "run").iterdir():  # as if the last run had failed at its first step
        if path.is_file():
            path.unlink()
        elif path.name != "stages":
            shutil.rmtree(path)
    with pytest.raises(ValueError, match="reference is a run with other settings"):
        run_of(tmp_path / "run", "doremi", counts="equal").start()


def test_invalid_weights_raise_before_reference_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="floor"):
        run_of(tmp_path / "run", "doremi", floor=0.5).start()
    assert not list(tmp_path.iterdir())
