"""Optimizers, layers and kinds of traces that are registered from outside the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import mixwell
from helpers.toy_problems import mse, names, regression_batches, train, train_mixed
from mixwell import DenseTraces, Hypergradient, ProjectedTraces, SketchedTraces
from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules import LAYER_RULES, LayerRule
from mixwell.hypergradient.responses import RESPONSES, OptimizerResponse, Preconditioner, StepResponse
from mixwell.hypergradient.traces import TRACES
from mixwell.reference.comparison import relative_error

INPUTS, OUTPUTS, RATE, DECAY, MOMENTUM, STEPS = 6, 4, 0.1, 0.3, 0.7, 5
WEIGHTS = [0.2, 0.5, 0.3]


def matrix(seed: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LEFT, RIGHT = matrix(1, OUTPUTS, OUTPUTS), matrix(2, INPUTS, INPUTS)


class TwoSided(torch.optim.Optimizer):
    """``W <- (1 - lr lambda) W - lr L G R`` with matrices that are not symmetric."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(1 - RATE * DECAY).sub_(LEFT @ parameter.grad @ RIGHT, alpha=RATE)


class Matrices(Preconditioner):
    @override
    def apply(self, gradient: Tensor) -> Tensor:
        return LEFT @ gradient @ RIGHT

    @override
    def apply_adjoint(self, vector: Tensor) -> Tensor:
        return LEFT.t() @ vector @ RIGHT.t()


@RESPONSES.register(TwoSided)
class TwoSidedModel(OptimizerResponse):
    preconditions = True

    @override
    def response(self, index: int, *, remaining: int) -> StepResponse:
        return StepResponse(rate=RATE, preconditioner=Matrices, decoupled=RATE * DECAY)


def polar(momentum: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
    return left @ right


class Orthogonalized(torch.optim.Optimizer):
    """Muon: ``M <- mu M + G; W <- W - lr U V^T`` for ``M = U S V^T``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter]["momentum"]
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(polar(momentum), alpha=RATE)


class PolarDerivative(Preconditioner):
    """The derivative of ``M -> U V^T``, which is symmetric."""

    def __init__(self, momentum: Tensor) -> None:
        self._momentum = momentum.clone()

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        return torch.func.jvp(polar, (self._momentum,), (gradient,))[1]


@RESPONSES.register(Orthogonalized)
class OrthogonalizedModel(OptimizerResponse):
    preconditions = True

    @override
    def response(self, index: int, *, remaining: int) -> StepResponse:
        return StepResponse(
            rate=RATE * (1 - MOMENTUM**remaining) / (1 - MOMENTUM),
            preconditioner=lambda: PolarDerivative(self.state(index)["momentum"]),
            folded=True,
        )


def new_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=False).double()


# A loss that is linear in the parameters has a constant gradient and no curvature, so that the response of
# the first order is exact.
ROWS, SLOPES = matrix(3, 12, INPUTS), matrix(4, 12, OUTPUTS)
LABELS = np.repeat(np.arange(3), 4)
VALIDATION = matrix(5, 8, INPUTS), matrix(6, 8, OUTPUTS)


def row_losses(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    return (model(ROWS[rows]) * SLOPES[rows]).sum(dim=1)


def rows_of(domain: int) -> slice:
    return slice(4 * domain, 4 * domain + 4)


def new_optimizer(kind: str, model: nn.Linear) -> torch.optim.Optimizer:
    if kind == "two-sided":
        return TwoSided(model.parameters())
    optimizer = Orthogonalized(model.parameters())
    gradients = [torch.autograd.grad(row_losses(model, rows_of(j)).mean(), model.weight)[0] for j in range(3)]
    # Where momentum does not change, neither does the derivative.
    total = sum(w * g for w, g in zip(WEIGHTS, gradients, strict=True))
    optimizer.state[model.weight]["momentum"] = total / (1 - MOMENTUM)
    return optimizer


def final_loss(kind: str, weights: list[float]) -> float:
    """The validation loss of the real optimizer."""
    model = new_model()
    optimizer = new_optimizer(kind, model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [row_losses(model, rows_of(j)).mean() for j in range(3)]
        sum(w * loss for w, loss in zip(weights, losses, strict=True)).backward()
        optimizer.step()
    return mse(model, VALIDATION).item()


def differences(kind: str, eps: float = 1e-5) -> np.ndarray:
    found = []
    for j in range(3):
        ends = [[w + sign * eps * (i == j) for i, w in enumerate(WEIGHTS)] for sign in (1, -1)]
        found.append((final_loss(kind, ends[0]) - final_loss(kind, ends[1])) / (2 * eps))
    return np.array(found)


TRACE_KINDS: dict[str, tuple[Callable[[], mixwell.Traces], float]] = {
    "dense": (DenseTraces, 1e-7),
    "bfloat16": (lambda: DenseTraces(dtype=torch.bfloat16), 0.05),
    "projected": (lambda: ProjectedTraces(64), 1e-7),
    "sketched": (lambda: SketchedTraces(2000), 1e-7),
}


@pytest.mark.parametrize(
    ("traces", "mixed"),
    [(kind, mixed) for kind in TRACE_KINDS for mixed in (False, True) if not (mixed and kind == "sketched")],
)
@pytest.mark.parametrize("kind", ["two-sided", "orthogonalized"])
def test_nondiagonal_preconditioner(kind: str, traces: str, mixed: bool) -> None:
    """Scores against differences of real trainings."""
    make, tolerance = TRACE_KINDS[traces]
    model = new_model()
    optimizer = new_optimizer(kind, model)
    signal = Hypergradient(0.0, make(), points=1)
    mixer = mixwell.Mixer(
        model, optimizer, names(3), horizon=STEPS, weights=WEIGHTS, signal=signal, update=1.0
    )
    for _ in range(STEPS):
        if mixed:
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(row_losses(model)).backward()
        else:
            for j, name in enumerate(names(3)):
                with mixer.domain(name):
                    row_losses(model, rows_of(j)).mean().backward()
        mixer.step()
    with mixer.validation():
        mse(model, VALIDATION).backward()
    found = np.array(list(mixer.rounds[0].scores.values()))
    assert relative_error(found, differences(kind)) < tolerance


def test_forward_mode_requires_step_derivative() -> None:
    model = new_model()
    signal = Hypergradient(traces=mixwell.ForwardModeTraces())
    with pytest.raises(ValueError, match="TwoSidedModel does not differentiate the steps of TwoSided"):
        mixwell.Mixer(model, TwoSided(model.parameters()), names(3), horizon=2, signal=signal)


def test_coupled_weight_decay_requires_diagonal() -> None:
    response = StepResponse(rate=RATE, preconditioner=Matrices, coupled=0.1)
    with pytest.raises(ValueError, match="use decoupled weight decay"):
        response.shrink(0.0, clip=1.0)


class ScaledLinear(nn.Module):
    """A linear layer with a factor for each output, for which the package has no rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values) * self.scale


class ScaledLinearRule(LayerRule):
    calls: ClassVar[list[Tensor]] = []

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        return inputs[0]

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        self.calls.append(gradient)
        product = accumulator.row_groups.per_row(gradient * self.module.inner(saved))
        accumulator.add_vectors(self.param_indices["scale"], product)


class DoubledLinear(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def network(last: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), last()).double()


def both_forms(model: nn.Module, traces: mixwell.Traces) -> list[np.ndarray]:
    """The scores of one batch per domain with dense traces, and of mixed batches."""
    found = []
    batches, validation = regression_batches(0, steps=4)
    for loop, kind in ((train, DenseTraces()), (train_mixed, traces)):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        mixer = mixwell.Mixer(
            own, optimizer, names(3), horizon=4, signal=Hypergradient(traces=kind), update=1.0
        )
        loop(mixer, own, batches, validation)
        found.append(np.array(list(mixer.rounds[0].scores.values())))
    return found


@pytest.mark.parametrize("traces", [DenseTraces, lambda: ProjectedTraces(64)], ids=["dense", "projected"])
def test_registered_layer_rule(traces: Callable[[], mixwell.Traces], monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(ScaledLinear)
    apart, mixed = both_forms(model, traces())
    np.testing.assert_allclose(mixed, apart, rtol=1e-9)
    used = []
    monkeypatch.setitem(LAYER_RULES._found, ScaledLinear, ScaledLinearRule)
    monkeypatch.setattr(ScaledLinearRule, "calls", used)
    apart, mixed = both_forms(model, traces())
    np.testing.assert_allclose(mixed, apart, rtol=1e-9)
    assert used


def test_linear_subclass_keeps_its_forward() -> None:
    model = network(lambda: DoubledLinear(16, 4))
    apart, mixed = both_forms(model, DenseTraces())
    np.testing.assert_allclose(mixed, apart, rtol=1e-9)


def test_traces_by_name() -> None:
    settings = {"projected": {"projection_rank": 5}, "sketched": {"sketch_size": 70}}
    made = {name: TRACES.get(name)(**settings.get(name, {})).build() for name in TRACES.names()}
    assert {name: repr(one) for name, one in made.items()} == {
        "dense": "DenseTraces()",
        "bfloat16": "DenseTraces(dtype=torch.bfloat16)",
        "projected": "ProjectedTraces(5, unsupported='ignore', seed=0)",
        "sketched": "SketchedTraces(70, seed=0)",
    }
    with pytest.raises(ValueError, match="unknown kind of traces 'dance'; available: dense, bfloat16"):
        TRACES.get("dance")
