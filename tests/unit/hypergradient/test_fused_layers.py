"""Layers that compute the gradients of the domains in their own backward pass, compared with autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixwell.hypergradient.capture.accumulators import (
    DenseAccumulator,
    GradientAccumulator,
    ProjectedAccumulator,
)
from mixwell.hypergradient.capture.layer_rules import rule_for
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters

LABELS = np.array([2, 0, 0, 2, 1, 0])
RANK = 3

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "long sequences": (lambda: nn.Linear(4, 5), (6, 40, 4)),
    "single positions": (lambda: nn.Linear(40, 50), (6, 40)),
    "positions flattened into rows": (lambda: nn.Linear(4, 5), (30, 4)),
    "without bias": (lambda: nn.Linear(4, 5, bias=False), (6, 7, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 5, 3, stride=2, padding=1), (6, 2, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (2, 3), padding=(1, 0), dilation=(1, 2)), (6, 3, 7, 8)),
    "channels last": (lambda: channels_last(nn.Conv2d(4, 6, 3)), (6, 4, 7, 8)),
    "conv3d without bias": (lambda: nn.Conv3d(2, 3, 2, bias=False), (6, 2, 4, 3, 5)),
}


def channels_last(layer: nn.Module) -> nn.Module:
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def never(*_: object) -> bool:
    return False


def accumulators(parameters: Parameters) -> dict[str, tuple[GradientAccumulator, Callable[[], list[Tensor]]]]:
    """Return for each kind of traces an accumulator, and a function that gives what it holds by parameter."""
    groups = RowGroups(LABELS, 3)
    dense = [torch.zeros(3, *p.shape, dtype=p.dtype) for p in parameters.tensors]

    def add(domain: int, index: int, gradient: Tensor, factor: float, rows: slice | None) -> None:
        dense[index][domain][slice(None) if rows is None else rows] += factor * gradient

    projections = Projections(parameters, RANK, seed=0)
    projections.resample(0)
    projected = ProjectedAccumulator(projections, groups)

    def read() -> list[Tensor]:
        return [projections.block(projected.rows, i) for i in range(len(parameters))]

    return {
        "dense": (DenseAccumulator(parameters, groups, np.ones(3), add, lambda _: True), lambda: dense),
        "projected": (projected, read),
    }


@pytest.mark.parametrize("kind", ["dense", "projected"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_domains_and_of_the_layer(name: str, kind: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    names, tensors = zip(*layer.named_parameters(), strict=True)
    parameters = Parameters(names, tensors, (0,) * len(tensors), layer)
    x = torch.randn(shape, dtype=torch.float64)
    if name == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    accumulator, read = accumulators(parameters)[kind]
    rule = rule_for(layer, {one: index for index, one in enumerate(names)})
    assert rule is not None
    fused = rule.fuse(accumulator, never)
    assert fused is not None
    weight = torch.randn_like(layer(x))
    with fused:
        assert "forward" in vars(layer)
        (layer(x) * weight).sum().backward()
    assert "forward" not in vars(layer)
    found = [x.grad, *(p.grad for p in tensors)]
    wanted = torch.autograd.grad((layer(x) * weight).sum(), [x, *tensors])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    rows = x.detach().unflatten(0, (len(LABELS), -1))
    by_row = weight.unflatten(0, (len(LABELS), -1))
    for domain in range(3):
        mine = torch.from_numpy(domain == LABELS)
        loss = (layer(rows[mine].flatten(0, 1)) * by_row[mine].flatten(0, 1)).sum()
        for index, gradient in enumerate(torch.autograd.grad(loss, tensors)):
            if kind == "projected":
                assert isinstance(accumulator, ProjectedAccumulator)
                gradient = accumulator.projections.each[index].project(gradient)
            torch.testing.assert_close(read()[index][domain], gradient)


def test_both_ways_to_project_are_taken() -> None:
    """Long sequences of few domains by the gradients of the domains, single positions by their own projections."""
    for name, separate in (("long sequences", True), ("single positions", False)):
        make, shape = LAYERS[name]
        layer = make()
        names, tensors = zip(*layer.named_parameters(), strict=True)
        accumulator, _ = accumulators(Parameters(names, tensors, (0, 0), layer))["projected"]
        assert isinstance(accumulator, ProjectedAccumulator)
        inputs = torch.zeros(shape).view(len(LABELS), -1, shape[-1])
        assert accumulator._separates(0, layer(inputs), inputs) is separate


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(1, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding_mode="circular", padding=1)],
    ids=["padding in words", "circular"],
)
def test_other_convolutions_are_not_fused(layer: nn.Module) -> None:
    names, tensors = zip(*layer.named_parameters(), strict=True)
    accumulator, _ = accumulators(Parameters(names, tensors, (0, 0), layer))["projected"]
    rule = rule_for(layer, {one: index for index, one in enumerate(names)})
    assert rule is None or rule.fuse(accumulator, never) is None


def test_a_wrapped_layer_keeps_its_wrapper() -> None:
    layer = nn.Conv2d(1, 2, 3)
    names, tensors = zip(*layer.named_parameters(), strict=True)
    accumulator, _ = accumulators(Parameters(names, tensors, (0, 0), layer))["projected"]
    rule = rule_for(layer, {"weight": 0, "bias": 1})
    assert rule is not None
    layer.forward = lambda x: nn.Conv2d.forward(layer, x) * 2  # type: ignore[method-assign]
    assert rule.fuse(accumulator, never) is None
