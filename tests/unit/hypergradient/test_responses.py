"""What every model of an optimizer says of a gradient, against what the real optimizer makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.contract_tables import NOT_DIFFERENTIATED, OPTIMIZERS
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import (
    AdamResponse,
    OptimizerResponse,
    PlainResponse,
    SgdResponse,
    response_for,
)

SIZE, STEPS, EPS = 12, 8, 1e-3
Start = Callable[[torch.optim.Optimizer], None]


def gradients(count: int) -> Tensor:
    """Given gradients, far from zero, where the first step of Adam has no derivative."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(count, SIZE, generator=generator, dtype=torch.float64)
    return drawn + 0.5 * drawn.sign()


DIRECTION = torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def fresh(optimizer: torch.optim.Optimizer) -> None:
    """No step has been made."""


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Three steps have been made."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in gradients(STEPS + 3)[STEPS:]:
        parameter.grad = gradient.clone()
        optimizer.step()


def settled(optimizer: torch.optim.Optimizer) -> None:
    """A million steps have been made, so that one more gradient does not change the second moments of Adam."""
    stepped(optimizer)
    (parameter,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[parameter]
    if "exp_avg_sq" in state:
        group = optimizer.param_groups[0]
        group["betas"] = group["betas"][0], 1 - 1e-9
        state["step"].fill_(1e6)
        root = torch.linspace(1, 2, SIZE, dtype=torch.float64)
        state["exp_avg_sq"].copy_(root.square() * (1 - group["betas"][1] ** 1e6))
        if group["amsgrad"]:
            state["max_exp_avg_sq"].copy_(9 * state["exp_avg_sq"])


def young(optimizer: torch.optim.Optimizer) -> None:
    """As settled, but the first moments are near their beginning at zero, for which Adam corrects."""
    settled(optimizer)
    group = optimizer.param_groups[0]
    group["betas"] = 1 - 1e-6, group["betas"][1]
    optimizer.state[group["params"][0]]["exp_avg"].zero_()


def started(kind: str, start: Start) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
    optimizer = OPTIMIZERS[kind]([parameter])
    start(optimizer)
    return parameter, optimizer


def view(kind: str, start: Start) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, OptimizerResponse]:
    parameter, optimizer = started(kind, start)
    parameters = Parameters(("theta",), (parameter,), (0,))
    if kind == "unknown":
        with pytest.warns(UserWarning, match="does not know the optimizer OwnDescent"):
            return parameter, optimizer, response_for(optimizer, parameters)
    return parameter, optimizer, response_for(optimizer, parameters)


def end(kind: str, start: Start, at: int, change: float, decay: float) -> Tensor:
    """Where the real optimizer ends if the gradient of step ``at`` is changed."""
    parameter, optimizer = started(kind, start)
    for t, gradient in enumerate(gradients(STEPS)):
        parameter.grad = gradient + (change if t == at else 0.0) * DIRECTION
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= decay
    return parameter.detach()


def difference(kind: str, start: Start, at: int, *, decay: float = 1.0) -> Tensor:
    """``-d theta / d change`` at the end, by central differences."""
    ends = [end(kind, start, at, sign * EPS, decay) for sign in (1, -1)]
    return (ends[1] - ends[0]) / (2 * EPS)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_optimizer_is_in_contract_table() -> None:
    assert {type(view(kind, fresh)[2]) for kind in OPTIMIZERS} == {SgdResponse, AdamResponse, PlainResponse}
    built_in = {k for k in OptimizerResponse.__subclasses__() if k.__module__.startswith("mixwell.")}
    assert built_in == {SgdResponse, AdamResponse, PlainResponse}


@pytest.mark.parametrize("at", [0, 1, 4, STEPS - 1])
@pytest.mark.parametrize("start", [fresh, stepped])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in NOT_DIFFERENTIATED])
def test_differentiated_step_matches_real_steps(kind: str, start: Start, at: int) -> None:
    """Of every step until the end, the optimizer's moments and a schedule of its learning rate included."""
    expected = difference(kind, start, at, decay=0.8)
    parameter, optimizer, model = view(kind, start)
    trace = torch.zeros_like(DIRECTION)
    moments = [torch.zeros_like(DIRECTION) for _ in range(model.moments)]
    for t, gradient in enumerate(gradients(STEPS)):
        source = DIRECTION if t == at else torch.zeros_like(DIRECTION)
        model.invalidate()
        model.differentiate_step(0, gradient, source, trace, moments)
        parameter.grad = gradient.clone()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.8
    assert relative(trace, expected) < 1e-6


# Momentum spreads a gradient over the steps to come, and the decay of the trace takes it for one that has acted at
# once: an error of the order of learning rate times decay times the number of steps that momentum remembers.
FIRST_ORDER = {
    "momentum with decay": 0.02,
    "maximizing sgd": 0.01,
    "adam with decay": 0.005,
    "adamw": 1e-3,
    "adamw with strong decay": 0.006,
    "amsgrad": 1e-3,
    "maximizing adam": 0.005,
}
# While the second moments of Adam still move, so does its response: it is known to the order of one step over the
# number of steps so far, and the first step leaves no trace.
ADAM = [kind for kind in OPTIMIZERS if "adam" in kind or kind == "amsgrad"]
STARTS = [
    *((kind, settled) for kind in ADAM),
    ("adam", young),
    *((kind, start) for kind in OPTIMIZERS if kind not in ADAM for start in (fresh, stepped)),
]


@pytest.mark.parametrize("at", [0, 1, 4, STEPS - 1])
@pytest.mark.parametrize(("kind", "start"), STARTS)
def test_response_is_effect_of_gradient_at_round_end(kind: str, start: Start, at: int) -> None:
    parameter, optimizer, model = view(kind, start)
    trace = torch.zeros_like(DIRECTION)
    for t, gradient in enumerate(gradients(STEPS)):
        model.invalidate()
        response = model.response(0, remaining=STEPS - t)
        trace = trace * response.shrink(0.0, clip=1.0)
        if t == at:
            trace = trace + response.rate * response.precondition(DIRECTION)
        parameter.grad = gradient.clone()
        optimizer.step()
    assert relative(trace, difference(kind, start, at)) < FIRST_ORDER.get(kind, 0.0) + 1e-4
