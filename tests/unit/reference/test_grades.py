"""Grades of a hypergradient: chance, directions that do not exist, and the precision of training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mixwell
from mixwell.reference.fidelity import Fidelity, Replication
from mixwell.reference.grades import Grade, chance_of_agreement, chance_of_cosine
from mixwell.training import fidelity


def measured(estimate: list[float], exact: list[float], replicates: int = 0) -> Fidelity:
    """A measurement in which all replicates have the same direction."""
    one, other = np.array(estimate), np.array(exact)
    cosine = mixwell.reference.comparison.tangent_cosine(one, other)
    again = None
    if replicates:
        again = Replication(np.stack([one] * replicates), 1.0, 1.0, other, cosine)
    names = tuple(f"d{j}" for j in range(len(one)))
    return Fidelity(names, 5, one, other, cosine, 1.0, 1.0, 0.5, again)


def test_chance_matches_closed_forms() -> None:
    assert chance_of_cosine(1.0, 2) == pytest.approx(0.5, abs=0.02)
    assert chance_of_cosine(0.8, 3) == pytest.approx(
        math.acos(0.8) / math.pi, abs=0.02
    )  # an arc of the circle
    assert chance_of_cosine(0.8, 4) == pytest.approx((1 - 0.8) / 2, abs=0.02)  # Archimedes' hat box
    assert chance_of_agreement(1.0, 2, 6) == pytest.approx(2**-5, abs=0.01)


def test_sign_of_two_domains_is_not_called_right() -> None:
    by_sign = measured([3.0, -3.0], [1.0, -1.0], replicates=3)
    assert by_sign.grade is Grade.USABLE
    assert "chance alone gives this in 50% of cases" in "".join(by_sign.verdict())
    assert "measure with 6 replicates" in "".join(by_sign.verdict())
    assert measured([3.0, -3.0], [1.0, -1.0]).grade is Grade.USABLE
    # Here the size agrees too, and six replicates have the same sign.
    assert measured([1.1, -1.0], [1.0, -1.0], replicates=6).grade is Grade.GOOD
    assert measured([-1.0, 1.0], [1.0, -1.0]).grade is Grade.DO_NOT_TRUST


def test_without_replicates_noise_is_not_called_measured() -> None:
    alone = measured([1.1, -1.0], [1.0, -1.0])
    assert alone.grade is Grade.GOOD
    assert alone.verdict()[0] == "Good on these batches."
    assert alone.verdict()[-1].startswith("Other batches: not measured")
    assert not any("not measured" in line for line in measured([1.1, -1.0], [1.0, -1.0], 6).verdict())


def test_no_direction_is_not_called_wrong(tmp_path: Path) -> None:
    none = measured([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    assert none.grade is Grade.NOT_MEASURED
    assert not any("wrong" in line for line in none.verdict())
    fidelity.add_measurement(tmp_path, 3, none)
    (kept,) = json.loads((tmp_path / fidelity.FILE).read_text(), parse_constant=pytest.fail)
    assert kept["cosine"] is None
    assert kept["grade"] == "not measured"


def test_values_that_are_not_finite_are_not_called_wrong() -> None:
    assert measured([1.0, 2.0, 3.0], [math.nan, 0.0, 1.0]).grade is Grade.NOT_MEASURED
    assert measured([1.0, 2.0, 3.0], [math.inf, 0.0, 1.0]).grade is Grade.NOT_MEASURED


def test_estimate_is_measured_in_the_precision_of_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{name: torch.randn(4, 4) for name in ("a", "b", "c")} for _ in range(4)]
    validation = torch.randn(8, 4)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()

    def rounded(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, rows)

    full = mixwell.measure_fidelity(model, optimizer, loss, batches, validation)
    half = mixwell.measure_fidelity(model, optimizer, loss, batches, validation, estimate_loss=rounded)
    assert half.exact.tolist() == full.exact.tolist()  # the truth is that of full precision
    difference = np.abs(half.estimate - full.estimate).max() / np.abs(full.estimate).max()
    assert 1e-5 < difference < 0.1  # bfloat16 has 8 bits
