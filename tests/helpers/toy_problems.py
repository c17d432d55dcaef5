"""Small problems and loops that several tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

import mixwell
from mixwell.hypergradient.curvature import Curvature
from mixwell.mixer.batch import StepCounts
from mixwell.reference.quadratics import Quadratic

Batch = tuple[Tensor, Tensor]


class Point(nn.Module):
    """A model that is one parameter vector."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta.clone())


class GivenCurvature(Curvature):
    """A coefficient of its own for every parameter tensor, by name."""

    def __init__(self, gammas: Mapping[str, float], *, default: float = 0.0) -> None:
        self.gammas, self.default = gammas, default

    def __repr__(self) -> str:
        return f"GivenCurvature({self.gammas}, default={self.default})"

    def coefficients(self) -> list[float]:
        return [self.gammas.get(name, self.default) for name in self.parameters.names]


def names(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def quadratic_round(
    quadratic: Quadratic,
    theta: Tensor,
    weights: Tensor,
    *,
    learning_rate: float,
    horizon: int,
    signal: mixwell.Signal,
) -> np.ndarray:
    """The scores of one round of the real mixer on a quadratic problem."""
    model = Point(theta)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    domains = names(len(weights))
    mixer = mixwell.Mixer(
        model, optimizer, domains, horizon=horizon, signal=signal, update=1.0, weights=weights.tolist()
    )
    problem = quadratic.problem()
    for t in range(horizon):
        for index, name in enumerate(domains):
            with mixer.domain(name):
                problem.losses(model.theta, t)[index].backward(create_graph=mixer.signal.requirements.graph)
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                problem.validation(model.theta).backward()
    return np.array(list(mixer.rounds[-1].scores.values()))


def two_layer(seed: int, *, hidden: int = 16, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 4)).to(dtype)


def regression_batches(
    seed: int, *, steps: int, domains: int = 3, rows: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[list[dict[str, Batch]], Batch]:
    """Batches of regression tasks that differ by domain; the target is nearest to the second."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    maps = [normal(6, 4) * 0.6 for _ in range(domains)]
    target = 0.8 * maps[min(1, domains - 1)] + 0.2 * maps[0]

    def draw(matrix: Tensor) -> Batch:
        inputs = normal(rows, 6)
        return inputs, torch.tanh(inputs @ matrix) + 0.1 * normal(rows, 4)

    steps_ = [{name: draw(m) for name, m in zip(names(domains), maps, strict=True)} for _ in range(steps)]
    return steps_, draw(target)


def mse(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def step_by_domain(
    mixer: mixwell.Mixer,
    model: nn.Module,
    step: Mapping[str, Batch],
    loss: Callable[[nn.Module, Batch], Tensor] = mse,
) -> None:
    """One training step with one batch per domain."""
    for name, batch in step.items():
        with mixer.domain(name):
            loss(model, batch).backward(create_graph=mixer.signal.requirements.graph)
    mixer.step()


def step_mixed(mixer: mixwell.Mixer, model: nn.Module, step: Mapping[str, Batch]) -> None:
    """One training step with one batch, in which the rows of the domains take turns."""
    x, y = (torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*step.values(), strict=True))
    with mixer.batch(list(step) * (len(x) // len(step))) as batch:
        batch.weighted_loss((model(x) - y).square().mean(dim=1)).backward()
    mixer.step()


def train(
    mixer: mixwell.Mixer,
    model: nn.Module,
    batches: Iterable[Mapping[str, Batch]],
    validation: Batch,
    loss: Callable[[nn.Module, Batch], Tensor] = mse,
) -> None:
    """The loop of the README."""
    for step in batches:
        step_by_domain(mixer, model, step, loss)
        if mixer.validation_due:
            with mixer.validation():
                loss(model, validation).backward()


def train_mixed(
    mixer: mixwell.Mixer, model: nn.Module, batches: Iterable[Mapping[str, Batch]], validation: Batch
) -> None:
    """:func:`train` with mixed batches."""
    for step in batches:
        step_mixed(mixer, model, step)
        if mixer.validation_due:
            with mixer.validation():
                mse(model, validation).backward()


def labeled_batch(
    labels: Sequence[str], names: Sequence[str], probabilities: Mapping[str, float] | None = None
) -> mixwell.MixtureBatch:
    """A whole step in one batch, of domains that are in a step with some probability."""
    counts = dict(Counter(labels))
    step = StepCounts(counts, counts, dict(probabilities or {}))
    numbers = torch.tensor([list(names).index(label) for label in labels])
    return mixwell.MixtureBatch(tuple(names), numbers, step)
