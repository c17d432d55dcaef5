"""A small run with mixed batches of written-down rows, for methods that weigh every row."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mixwell
from helpers.toy_problems import labeled_batch
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes

Batch = tuple[Tensor, Tensor]
NAMES = ("clean", "turned", "noisy")
LR = 0.1


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def forward(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """The same network, written out, so that it can be differentiated through a step."""
    w1, b1, w2, b2 = parameters
    return torch.tanh(x @ w1.T + b1) @ w2.T + b2


def losses_at(parameters: Sequence[Tensor], batch: Batch) -> Tensor:
    x, y = batch
    return (forward(parameters, x).squeeze(1) - y).square()


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return row_losses(model, batch).mean()


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in model.parameters()]


class Feed:
    """Gives the k-th batch of a source, whoever asks."""

    def __init__(self, name: str, rows: int, *, use: str) -> None:
        self.name, self.rows, self.use, self.taken = name, rows, use, 0

    def at(self, k: int) -> Batch:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {self.use} {k}".encode()))
        x = torch.randn(self.rows, 3, generator=generator, dtype=torch.float64)
        slope = {"turned": [-0.5, 1.0, 0.3], "noisy": [0.0, 0.0, 0.0]}.get(self.name, [1.0, 0.5, -0.5])
        noise = torch.randn(self.rows, generator=generator, dtype=torch.float64)
        return x, x @ torch.tensor(slope, dtype=torch.float64) + (
            2.0 if self.name == "noisy" else 0.1
        ) * noise

    def __call__(self) -> Batch:
        self.taken += 1
        return self.at(self.taken - 1)


def joined(batches: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@dataclass
class Run:
    """A run of a signal.

    Args:
        signal: what weighs the rows.
        update: how the weights move.
        horizon: T.
        rows: of each domain in a step.
        names: of the domains.
        sources: whose rows each domain has, where they are not its own.
        weights: of the domains at first.
        probe_rows: of a probe batch of each domain; of a validation batch twice as many.
    """

    signal: Signal
    update: Any = 1.0
    horizon: int = 1
    rows: Sequence[int] = (4, 4, 4)
    names: Sequence[str] = NAMES
    sources: Mapping[str, str] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    probe_rows: int = 3
    warmup: int = 0
    budget: int | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    on_nonfinite: Any = "raise"

    def __post_init__(self) -> None:
        self.model = network()
        self.feeds = {
            n: Feed(self.sources.get(n, n), k, use="training")
            for n, k in zip(self.names, self.rows, strict=True)
        }
        self.asides = {n: Feed(self.sources.get(n, n), self.probe_rows, use="probes") for n in self.names}
        self.validation = Feed("clean", 2 * self.probe_rows, use="validation")
        self.aside = Feed("clean", 2 * self.probe_rows, use="validation aside")
        self.probes = Probes(self.model, mean_loss, self.asides, self.aside, row_losses)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.mixer = mixwell.Mixer(
            self.model,
            self.optimizer,
            list(self.names),
            horizon=self.horizon,
            signal=self.signal,
            update=self.update,
            weights=self.weights,
            probes=self.probes,
            warmup=self.warmup,
            budget=self.budget,
            on_nonfinite=self.on_nonfinite,
        )
        self.seen: list[float] = []

    @property
    def vector(self) -> np.ndarray:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy().copy()

    def batch(self, k: int, absent: Sequence[str] = ()) -> tuple[Batch, list[str]]:
        present = [n for n in self.names if n not in absent]
        labels = [n for n in present for _ in range(self.feeds[n].rows)]
        return joined([self.feeds[n].at(k) for n in present]), labels

    def step(self, batch: Batch | None = None, labels: Sequence[str] | None = None) -> None:
        """One training step, on the batch of this step or on another one."""
        if batch is None or labels is None:
            batch, labels = self.batch(self.mixer.steps_done)
        with self.mixer.batch(labeled_batch(labels, self.names, self.probabilities)) as rows:
            loss = rows.weighted_loss(row_losses(self.model, batch), data=batch)
            loss.backward()
        self.seen.append(float(loss.detach()))
        self.mixer.step()
        if self.mixer.validation_due:
            with self.mixer.validation():
                mean_loss(self.model, self.validation()).backward()

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def counters(self) -> list[int]:
        return [feed.taken for feed in (*self.asides.values(), self.validation, self.aside)]

    def take_over(self, other: Run) -> None:
        """Go on where another run is, as a resumed one does."""
        self.model.load_state_dict(other.model.state_dict())
        state = other.mixer.state_dict()
        plain = {**state, "tensors": {name: t.clone() for name, t in state["tensors"].items()}}
        self.mixer.load_state_dict(plain)
        feeds = (*self.asides.values(), self.validation, self.aside)
        for feed, taken in zip(feeds, other.counters(), strict=True):
            feed.taken = taken
