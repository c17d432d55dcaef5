"""Trainings whose exchanges are counted, in a module that other processes can import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.distributed_training import wrapped
from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces, distributed
from mixwell.distributed.communication import Traffic, TrafficCounter

DOMAINS, LONG, POINTS = 4, 150, 4
ARMS = [
    ("ddp", "plain"),
    ("ddp", "dense"),
    ("ddp", "projected"),
    ("fsdp", "plain"),
    ("fsdp", "projected"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(160, 160) for _ in range(1)])
        self.last = nn.Linear(160, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).sum(dim=1)


def count(folder: str) -> None:
    """Train in all ways, and write what was exchanged."""
    found: dict[str, Any] = {}
    for way, kind in ARMS:
        for points in (1,) if kind == "plain" else (1, POINTS):
            torch.manual_seed(0)
            found[f"{way}-{kind}-{points}"] = train(wrapped(Net(), way), kind, points)
    Path(folder, f"{distributed.rank()}.json").write_text(json.dumps(found))


def train(model: nn.Module, kind: str, points: int) -> dict[str, Any]:
    """A round, or two of which the second is counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, labels = torch.randn(8, 160), torch.arange(8) % DOMAINS
    mixer = None
    if kind != "plain":
        traces = DenseTraces() if kind == "dense" else ProjectedTraces(8)
        names = [str(number) for number in range(DOMAINS)]
        signal = Hypergradient(traces=traces, points=points)
        mixer = Mixer(model, optimizer, names, horizon=LONG, signal=signal)
    found = Traffic()
    for _ in range(2 if kind == "projected" else 1):  # the first has no validation gradient to project around
        with TrafficCounter() as counter:
            for _ in range(LONG):
                if mixer is None:
                    model(rows).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                elif kind == "dense":
                    for number in range(DOMAINS):
                        with mixer.domain(str(number)):
                            model(rows[labels == number]).square().mean().backward()
                    mixer.step()
                else:
                    with mixer.batch(labels) as batch:
                        batch.weighted_loss(model(rows).square()).backward()
                    mixer.step()
                if mixer is not None and mixer.validation_due:
                    with mixer.validation():
                        model(rows).square().mean().backward()
        found = counter.traffic
    return vars(found)
