"""Networks with one layer to be tested, trained on mixed batches or with one pass per domain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import mixwell
from helpers.mixed_batches import DOMAINS, EXACT
from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces

WIDTH, LENGTH = 8, 5

TRACES: dict[str, Callable[[], mixwell.Traces]] = {
    "dense": DenseTraces,
    "bfloat16": lambda: DenseTraces(dtype=torch.bfloat16),
    "projected": lambda: ProjectedTraces(EXACT),
}


def network(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer, nn.Linear(WIDTH, 3)).double()


def row_losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=-1, keepdim=True).sin()).square().flatten(1).mean(dim=1)


def rows_of_normal_numbers(step: int, rows: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=random, dtype=torch.float64)


def train(
    model: nn.Module,
    labels: Tensor,
    traces: mixwell.Traces,
    *,
    mixed: bool,
    steps: int = 8,
    draw: Callable[[int, int, torch.Generator], Tensor] = rows_of_normal_numbers,
) -> Mixer:
    """Train on batches with the same rows and random numbers, mixed or by domain.

    Args:
        draw: takes the step, the number of rows and the generator.
    """
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    signal = Hypergradient(traces=traces)
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    mixer = Mixer(model, optimizer, DOMAINS, horizon=steps, signal=signal, update=1.0, weights=weights)
    for step in range(steps):
        x = draw(step, len(labels), random)
        if mixed:
            torch.manual_seed(step)
            with mixer.batch(labels) as scope:
                scope.weighted_loss(row_losses(model, x)).backward()
        else:
            # All rows run, as in the mixed batch: some layers depend on the position of a row.
            for place, name in enumerate(DOMAINS):
                torch.manual_seed(step)
                with mixer.domain(name):
                    row_losses(model, x)[torch.eq(labels, place)].mean().backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                row_losses(model.eval(), draw(step, 4, random)).mean().backward()
            model.train()
    return mixer
