"""Work for the tests of several processes, in a module that they can import."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mixwell import Hypergradient, Mixer, ProjectedTraces
from mixwell.models.gpt import Gpt

DOMAINS = ["a", "b", "c"]
LABELS = torch.tensor([2, 0, 0, 1, 2, 2])
PROCESSES = 2


def rows(rank: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(rank)
    steps = [torch.randint(0, 11, (len(LABELS), 9), generator=generator) for _ in range(4)]
    return steps, torch.randint(0, 11, (5, 9), generator=generator)


def row_losses(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch[:, :-1])
    losses = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1).mean(dim=1)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(11, context=8, layers=2, heads=2, width=8).double()


def train(
    model: nn.Module, kind: str, steps: list[Tensor], validation: Tensor, labels: Tensor
) -> dict[str, float]:
    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = optimizers[kind](model.parameters(), lr=0.01)
    signal = Hypergradient(traces=ProjectedTraces(3))
    mixer = Mixer(model, optimizer, DOMAINS, horizon=len(steps), signal=signal, update=1.0, clip_norm=0.5)
    for batch in steps:
        with mixer.batch(labels) as mixed:
            mixed.weigh(row_losses(model, batch)).backward()
        mixer.step()
    with mixer.validation():
        row_losses(model, validation).mean().backward()
    return mixer.update().scores


def work(rank: int, port: int, way: str, kind: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    try:
        model = new_model()
        if way == "ddp":
            model = DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (PROCESSES,))
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        found = train(model, kind, *rows(rank), LABELS)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    finally:
        torch.distributed.destroy_process_group()
