"""How others learn domain weights, each as a round of T steps on a workload of :mod:`workloads`.

Each is given the cheapest form that we know of: one forward pass on the batch of all domains wherever its rule
allows it. Those that estimate the hypergradient leave the weights uniform; an update of m numbers costs nothing.

=================  ==========================================================================================
recipe             what it computes
=================  ==========================================================================================
``unroll``         the exact hypergradient of T steps of SGD, by reverse mode through all of them (TorchOpt)
``forward_mode``   the same by forward mode: the derivative by every weight is carried along (torch.func)
``betty_darts``    finite differences through one step at the end: the hypergradient of the last step only (Betty)
``betty_neumann``  T terms of a Neumann series at the end, as if the model had converged (Betty)
``doge``           at every step, how each domain's gradient aligns with the validation gradient (DoGE)
``doremi``         at every step, each domain's loss in excess of a reference model's (DoReMi)
=================  ==========================================================================================
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from domains import Batch
from measure import Round
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from workloads import LEARNING_RATE, Data, Workload, mean_loss, row_losses


def uniform(workload: Workload) -> Tensor:
    """Weights to begin with."""
    return torch.full((workload.domains,), 1 / workload.domains)


def weighted_loss(model: Callable[..., Any], batch: Batch, weights: Tensor, data: Data) -> Tensor:
    """``sum_j w_j l_j`` with ``l_j`` the mean loss of the domain's rows; every domain has the same number."""
    rows = len(data.labels) // len(weights)
    return (weights[data.labels] * row_losses(model, batch)).sum() / rows


def unroll(workload: Workload, data: Data) -> Round:
    """TorchOpt's differentiable SGD; the graph of all T steps is kept until the validation loss is there."""
    import torchopt

    model, weights = workload.model(), uniform(workload).requires_grad_()
    optimizer = torchopt.MetaSGD(model, lr=LEARNING_RATE)
    scores: list[list[float]] = []

    def train() -> None:
        for batch in data.steps:
            optimizer.step(weighted_loss(model, batch, weights, data))

    def finish() -> None:
        (gradient,) = torch.autograd.grad(mean_loss(model, data.validation), weights)
        scores.append(gradient.tolist())
        torchopt.stop_gradient(model)
        torchopt.stop_gradient(optimizer)

    return Round(train, finish, scores)


def forward_mode(workload: Workload, data: Data) -> Round:
    """``d theta / d w_j`` for all j at once, by a batched Jacobian-vector product with each step of SGD."""
    model, weights = workload.model(), uniform(workload)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    units = torch.eye(workload.domains)
    scores: list[list[float]] = []

    def loss(params: dict[str, Tensor], w: Tensor, batch: Batch) -> Tensor:
        return weighted_loss(partial(functional_call, model, params), batch, w, data)

    def step(batch: Batch, params: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        gradients = grad(loss)(params, w, batch)
        return {name: p - LEARNING_RATE * gradients[name] for name, p in params.items()}

    def zeros() -> dict[str, Tensor]:
        return {name: p.new_zeros(workload.domains, *p.shape) for name, p in theta.items()}

    tangents = zeros()

    def advance(batch: Batch) -> Any:
        def push(tangent: dict[str, Tensor], unit: Tensor) -> Any:
            return jvp(partial(step, batch), (theta, weights), (tangent, unit))

        return vmap(push, out_dims=(None, 0))(tangents, units)

    def train() -> None:
        nonlocal theta, tangents
        for batch in data.steps:
            theta, tangents = advance(batch)

    def finish() -> None:
        nonlocal tangents
        target = grad(lambda params: mean_loss(partial(functional_call, model, params), data.validation))(
            theta
        )
        parts = [torch.einsum("m...,...->m", tangents[name], target[name]) for name in theta]
        scores.append(torch.stack(parts).sum(0).tolist())
        tangents = zeros()

    return Round(train, finish, scores)


def betty(kind: str, workload: Workload, data: Data) -> Round:
    """Betty's engine with T inner steps for one outer step; the outer update is switched off (learning rate 0)."""
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem

    scores: list[list[float]] = []

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.per_domain = torch.nn.Parameter(uniform(workload))

    class Outer(ImplicitProblem):
        def training_step(self, batch: Batch) -> Tensor:
            return mean_loss(self.inner, batch)

        def grad_callback(self) -> None:
            gradient = weights.per_domain.grad
            assert gradient is not None
            scores.append(gradient.tolist())

    class Inner(ImplicitProblem):
        def training_step(self, batch: Batch) -> Tensor:
            return weighted_loss(self.module, batch, weights.per_domain, data)

    model, weights = workload.model(), Weights()
    logging.disable(logging.INFO)
    outer = Outer(
        "outer",
        Config(log_step=-1),
        weights,
        torch.optim.SGD(weights.parameters(), lr=0.0),
        train_data_loader=[data.validation],
    )
    settings = Config(
        type=kind,
        unroll_steps=workload.horizon,
        neumann_iterations=workload.horizon - 1,
        neumann_alpha=LEARNING_RATE,
    )
    inner = Inner(
        "inner", settings, model, workload.optimizer(model.parameters()), train_data_loader=data.steps
    )
    engine = Engine(
        [outer, inner],
        EngineConfig(strategy="cpu"),
        {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}},
    )
    logging.disable(logging.NOTSET)
    engine.train()

    def train() -> None:
        for _ in data.steps:
            engine.train_step()

    return Round(train, scores=scores)


def doge(workload: Workload, data: Data) -> Round:
    """m + 1 backward passes in every step, and the weights move in every step; T plays no part."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    parameters = list(model.parameters())
    weights = uniform(workload)
    temperature, longest = 0.01, 5.0

    def clipped(batch: Batch) -> tuple[list[Tensor], float]:
        gradients = list(torch.autograd.grad(mean_loss(model, batch), parameters))
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if norm > longest:
            for gradient in gradients:
                gradient.mul_(longest / norm)
        return gradients, min(norm, longest)

    def dot(left: list[Tensor], right: list[Tensor]) -> float:
        return sum(float(torch.dot(a.flatten(), b.flatten())) for a, b in zip(left, right, strict=True))

    def train() -> None:
        nonlocal weights
        for parts in data.parts:
            found, norms = zip(*[clipped(part) for part in parts], strict=True)
            target, _ = clipped(data.validation)
            aligned = torch.tensor([dot(gradients, target) for gradients in found])
            gain = LEARNING_RATE * aligned / (sum(norms) / len(norms) + 1e-6)
            weights = torch.softmax(weights.log() + gain.clamp(0, 5 * LEARNING_RATE) / temperature, 0)
            for parameter, first, *others in zip(parameters, *found, strict=True):
                total = first.mul_(float(weights[0]))
                for weight, other in zip(weights[1:].tolist(), others, strict=True):
                    total.add_(other, alpha=weight)
                parameter.grad = total
            optimizer.step()

    return Round(train)


def doremi(workload: Workload, data: Data) -> Round:
    """A proxy's steps with a frozen reference; training that reference first, a whole run, is not counted."""
    model, reference = workload.model(), copy.deepcopy(workload.model()).requires_grad_(False)
    optimizer = workload.optimizer(model.parameters())
    weights = uniform(workload)

    def train() -> None:
        nonlocal weights
        for batch in data.steps:
            optimizer.zero_grad()
            losses = row_losses(model, batch)
            with torch.no_grad():
                excess = (losses - row_losses(reference, batch)).clamp(min=0)
                by_domain = torch.zeros_like(weights).index_add_(0, data.labels, excess) / workload.rows
                weights = torch.softmax(weights.log() + by_domain, 0)
                weights = (1 - 1e-3) * weights + 1e-3 / workload.domains
            share = weights[data.labels]
            (share * losses).sum().div(share.sum()).backward()
            optimizer.step()

    return Round(train)
