"""Curvature in the decay of traces."""

from __future__ import annotations

import torch

import mixwell
from helpers.toy_problems import Point, names
from mixwell.hypergradient.responses.adam import _inverse_root


def test_curvature_with_momentum_is_stable() -> None:
    """Folded momentum makes ``1 - lr/(1-mu) gamma`` as low as -4 here; the trace must fade, not explode."""
    model = Point(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mixer = mixwell.Mixer(model, optimizer, names(2), horizon=30, signal=mixwell.Hypergradient(5.0))
    for _ in range(30):
        for index in range(2):
            with mixer.domain(f"d{index}"):
                (2.5 * (model.theta - index).square().sum()).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                model.theta.sum().backward()
    assert max(abs(s) for s in mixer.rounds[-1].scores.values()) < 10


def test_unseen_row_does_not_dominate() -> None:
    """An embedding row that only validation has: Adam's v is zero there."""
    second = torch.full((10, 4), 0.25, dtype=torch.float64)
    second[7] = 0.0
    scale = _inverse_root(second, 1e-8)
    assert float(scale[7].max()) <= 10 * float(scale[0].max()) * (1 + 1e-6)
