"""Fidelity with replicates: do other batches agree, and is the direction that in which the loss falls?"""

import numpy as np
import pytest
import torch
from torch import nn

import mixwell

NAMES = ("near", "far", "off")
CENTERS = {"near": 0.2, "far": 3.0, "off": -2.0}
Batch = torch.Tensor


class Point(nn.Module):
    """A parameter vector; the loss of a batch is its mean squared distance from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3))


def loss(model: nn.Module, rows: Batch) -> torch.Tensor:
    assert isinstance(model, Point)
    return 0.5 * (model.theta - rows).square().sum(dim=1).mean()


def draw(generator: torch.Generator, center: float, noise: float, rows: int = 4) -> Batch:
    return center + noise * torch.randn(rows, 3, generator=generator)


def measure(noise: float) -> mixwell.Fidelity:
    generator = torch.Generator().manual_seed(0)

    def steps() -> list[dict[str, Batch]]:
        return [{name: draw(generator, center, noise) for name, center in CENTERS.items()} for _ in range(10)]

    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return mixwell.measure_fidelity(
        model,
        optimizer,
        loss,
        steps(),
        draw(generator, 1.0, noise, rows=8),
        replicates=[(steps(), draw(generator, 1.0, noise, rows=8)) for _ in range(4)],
        held_out=[draw(generator, 1.0, noise, rows=512)],
    )


def test_noiseless_replicates_match_closed_form() -> None:
    found = measure(0.0)
    assert found.replication is not None
    assert found.replication.agreement == pytest.approx(1.0, abs=1e-6)
    assert found.replication.effect_cosine > 0.99
    # With weights that sum to s, theta_T = (1 - (1 - eta s)^T) / s * sum_j w_j c_j; moving one of them moves s.
    weights, eta, difference = np.full(3, 1 / 3), 0.05, 0.1
    centers = np.array(list(CENTERS.values()))

    def end(moved: np.ndarray) -> float:
        total = moved.sum()
        return 1.5 * ((1 - (1 - eta * total) ** 10) / total * (moved @ centers) - 1.0) ** 2

    expected = [
        (end(weights + difference * unit) - end(weights - difference * unit)) / (2 * difference)
        for unit in np.eye(3)
    ]
    assert found.replication.effect == pytest.approx(expected, rel=1e-4)


def test_noise_lowers_only_agreement_of_replicates() -> None:
    clean, noisy = measure(0.1), measure(20.0)
    assert clean.replication is not None
    assert noisy.replication is not None
    assert clean.replication.agreement > 0.9 > noisy.replication.agreement
    assert noisy.replication.worst <= noisy.replication.agreement
    assert noisy.cosine > 0.95


def test_verdict_text() -> None:
    lines = measure(0.0).verdict()
    assert len(lines) == 4
    assert lines[0].startswith("Good")
    assert "the estimate is right" in lines[1]
    assert "one round's direction can be trusted" in lines[2]
    assert "the weights move where the loss falls" in lines[3]
    printed = str(measure(20.0))
    assert "true effect" in printed
    assert "noise" in printed


def test_invalid_replicates_raise() -> None:
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = {name: torch.zeros(2, 3) for name in NAMES}
    wanted = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="a single replicate has no other to agree with; give at least 2"):
        mixwell.measure_fidelity(model, optimizer, loss, [batch], wanted, replicates=[([batch], wanted)])
    with pytest.raises(ValueError, match="a replicate has 2 steps"):
        mixwell.measure_fidelity(
            model, optimizer, loss, [batch], wanted, replicates=[([batch, batch], wanted)] * 2
        )
