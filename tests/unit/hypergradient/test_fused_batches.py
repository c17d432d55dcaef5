"""Fused layers in a model: calls without a gradient or with other rows, several backward passes, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixwell
from mixwell.hypergradient.capture.accumulators import DenseAccumulator
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters

STEPS, ROWS = 4, 4
LABELS = ["a"] * ROWS + ["b"] * ROWS
TRACES: dict[str, Callable[[], mixwell.Traces]] = {
    "dense": mixwell.DenseTraces,
    "projected": lambda: mixwell.ProjectedTraces(64),
}
Step = Callable[[mixwell.Mixer, nn.Module, Tensor, Tensor], None]


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(kind: str, step: Step) -> tuple[dict[str, float], nn.Module]:
    """Train for a round; layers are fused from the second step on."""
    model = new_model()
    signal = mixwell.Hypergradient(0.5, TRACES[kind](), points=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], horizon=STEPS, signal=signal, update=1e-9)
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randn(2 * ROWS, n, generator=generator).double() for n in (6, 3)] for _ in range(STEPS)]
    for x, y in batches:
        step(mixer, model, x, y)
        mixer.step()
    x, y = batches[-1]
    with mixer.validation():
        (model(x) - y).square().mean().backward()
    return dict(mixer.rounds[0].scores), model


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean(1)


def mixed(mixer: mixwell.Mixer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    with mixer.batch(LABELS) as scope:
        scope.weighted_loss(losses(model(x), y)).backward()


def with_other_calls(mixer: mixwell.Mixer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Calls that leave no gradient: without a graph on other rows, and on no rows."""
    with mixer.batch(LABELS) as scope:
        with torch.no_grad():
            model(x[:3])
        total = scope.weighted_loss(losses(model(x), y))
        (total + model(x[:0]).sum()).backward()


def with_a_copy(mixer: mixwell.Mixer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    with mixer.batch(LABELS) as scope:
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert not copied(x).any()
        scope.weighted_loss(losses(model(x), y)).backward()


@pytest.mark.parametrize("step", [with_other_calls, with_a_copy], ids=["other calls", "copy"])
@pytest.mark.parametrize("kind", TRACES)
def test_what_leaves_no_gradient_changes_nothing(kind: str, step: Step) -> None:
    (wanted, model), (found, other) = train(kind, mixed), train(kind, step)
    assert found == pytest.approx(wanted, rel=1e-9)
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, twin)


@pytest.mark.parametrize("kind", TRACES)
def test_a_later_backward_pass_through_the_batch_leaves_no_trace(kind: str) -> None:
    def step(mixer: mixwell.Mixer, model: nn.Module, x: Tensor, y: Tensor, *, again: bool) -> None:
        with mixer.batch(LABELS) as scope:
            outputs = model(x)
            scope.weighted_loss(losses(outputs, y)).backward(retain_graph=True)
        with mixer.auxiliary():
            (model(x) if again else outputs).square().mean().backward()

    wanted, _ = train(kind, lambda *given: step(*given, again=True))
    found, _ = train(kind, lambda *given: step(*given, again=False))
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Using backward")  # of a reference cycle
@pytest.mark.parametrize("kind", TRACES)
def test_gradients_with_a_graph(kind: str) -> None:
    """``create_graph=True``: the gradients are PyTorch's own, and can be differentiated."""

    def step(mixer: mixwell.Mixer, model: nn.Module, x: Tensor, y: Tensor) -> None:
        trained = list(model.parameters())
        wanted = torch.autograd.grad(losses(model(x), y).mean(), trained)
        with mixer.batch(LABELS) as scope:
            scope.weighted_loss(losses(model(x), y)).backward(create_graph=True)
            for parameter, other in zip(trained, wanted, strict=True):
                assert parameter.grad is not None
                assert parameter.grad.requires_grad
                torch.testing.assert_close(parameter.grad.detach(), other)
                parameter.grad = parameter.grad.detach()

    wanted, _ = train(kind, mixed)
    assert train(kind, step)[0] == pytest.approx(wanted, rel=1e-9)


def test_a_convolution_that_sees_more_images_than_rows_is_named() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.split = nn.Conv2d(1, 2, 2).double(), False

        def forward(self, x: Tensor) -> Tensor:
            if self.split:  # two halves of every image, as images of their own
                x = x.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
            return self.convolution(x).flatten(1).mean(1).unflatten(0, (2 * ROWS, -1)).mean(1)

    model = Patches()
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces(8), points=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixer = mixwell.Mixer(model, optimizer, ["a", "b"], horizon=4, signal=signal)
    x = torch.randn(2 * ROWS, 1, 4, 4).double()
    for _ in range(2):
        mixed_squares(mixer, model, x)
        mixer.step()
    model.split = True
    with pytest.raises(ValueError, match=r"convolution.weight \(the first dimension"):
        mixed_squares(mixer, model, x)


def mixed_squares(mixer: mixwell.Mixer, model: nn.Module, x: Tensor) -> None:
    with mixer.batch(LABELS) as scope:
        scope.weighted_loss(model(x).square()).backward()


def test_sums_of_half_precision_are_rounded_once() -> None:
    """A sum over many domains is as near the exact one as a product over all rows is."""
    torch.manual_seed(0)
    domains, rows = 16, 64
    outputs, inputs = (torch.randn(rows, 8, n).bfloat16() for n in (24, 32))
    parameter = nn.Parameter(torch.zeros(24, 32))
    groups = RowGroups(np.arange(rows) % domains, domains)
    accumulator = DenseAccumulator(
        Parameters(("x",), (parameter,), (0,)), groups, np.ones(domains), lambda *_: None, lambda _: True
    )
    found = accumulator.add_products_and_sum(0, outputs, inputs)
    exact = outputs.double().flatten(0, 1).t() @ inputs.double().flatten(0, 1)
    once = exact.bfloat16()
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() < 2 * (once.double() - exact).norm()
