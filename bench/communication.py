"""Bytes that ranks exchange with mixing and in plain data parallelism: counted, on the wire, and by formula.

Two processes on this machine (gloo) train a GPT of 1.6 M parameters on 8 domains, plain and mixed. Counted are the
bytes passed to torch.distributed; the wire is what the loopback device carried, in its own network namespace if
possible. Then the formula of mixwell.distributed.communication predicts 64 accelerators, 7 B parameters and 30
domains.

    python bench/communication.py [--steps 128]
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import plain_parser
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces
from mixwell.distributed.communication import Traffic, TrafficCounter, TrafficModel
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters
from mixwell.reference.theory import stochastic_horizon
from mixwell.training.models.gpt import Gpt

DOMAINS, ROWS, PROCESSES, CONTEXT, RANK = 8, 16, 2, 32, 32
SETUPS = {
    "plain DDP": ("ddp", "plain"),
    "DDP, by domain, dense": ("ddp", "dense"),
    "DDP, mixed, projected": ("ddp", "projected"),
    "plain FSDP2": ("fsdp", "plain"),
    "FSDP2, by domain, dense": ("fsdp", "dense"),
    "FSDP2, mixed, projected": ("fsdp", "projected"),
}
PLAIN = {"ddp": "plain DDP", "fsdp": "plain FSDP2"}


def new_model(way: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Gpt(256, context=CONTEXT, layers=8, heads=4, width=128)
    if way == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def row_losses(model: nn.Module, rows: Tensor) -> Tensor:
    scores = model(rows[:, :-1])
    losses = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1).mean(dim=1)


def on_the_wire() -> int:
    """Bytes that the loopback device has carried."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def train(kind: str, model: nn.Module, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = [f"domain {number}" for number in range(DOMAINS)]
    labels = torch.arange(ROWS) % DOMAINS
    rows = torch.randint(0, 256, (ROWS, CONTEXT + 1))
    mixer = None
    if kind != "plain":
        traces = DenseTraces() if kind == "dense" else ProjectedTraces(RANK)
        mixer = Mixer(model, optimizer, names, horizon=steps, signal=Hypergradient(traces=traces, points=1))

    def step() -> None:
        if mixer is None:
            row_losses(model, rows).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return
        if kind == "dense":
            for number, name in enumerate(names):
                with mixer.domain(name):
                    row_losses(model, rows[labels == number]).mean().backward()
        else:
            with mixer.batch(labels) as batch:
                batch.weighted_loss(row_losses(model, rows)).backward()
        mixer.step()

    def end() -> None:
        if mixer is not None:
            with mixer.validation():
                row_losses(model, rows).mean().backward()

    found: dict[str, Any] = {}
    for _ in range(2):  # the first round also takes memory and looks at the layers
        torch.distributed.barrier()
        begun, carried = time.perf_counter(), on_the_wire()
        with TrafficCounter() as counted:
            for _ in range(steps):
                step()
        found["step"] = vars(counted.traffic) | {"total": counted.traffic.total}
        with TrafficCounter() as ending:
            end()
        torch.distributed.barrier()
        found["round"] = vars(ending.traffic) | {"total": ending.traffic.total}
        found["seconds"] = time.perf_counter() - begun
        found["wire"] = on_the_wire() - carried
    found["held"] = 0 if mixer is None else mixer.nbytes
    return found


def work(rank: int, port: int, steps: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    found = {name: train(kind, new_model(way), steps) for name, (way, kind) in SETUPS.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def expected(name: str, steps: int, model: nn.Module) -> tuple[Traffic, Traffic]:
    way, kind = SETUPS[name]
    parameters = Parameters.of(model, torch.optim.AdamW(model.parameters()))
    projected = Projections(parameters, RANK, 0).size if kind == "projected" else 0
    size = sum(p.nbytes for p in parameters.tensors)
    outermost = [n for n in parameters.names if not n.startswith("blocks.")]
    training = TrafficModel(
        "ddp" if way == "ddp" else "fsdp",
        size=size,
        tensors=len(parameters),
        domains=DOMAINS,
        world_size=PROCESSES,
        mixed=kind == "projected",
        projected=projected,
        preconditioned=True,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        kept=sum(
            p.nbytes for n, p in zip(parameters.names, parameters.tensors, strict=True) if n in outermost
        ),
    )
    if kind == "plain":
        return training.plain_step * steps, Traffic()
    return training.step * steps, training.round()


def measure(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(folder, "found.json")
        spawn(work, (port, steps, str(out)), nprocs=PROCESSES)
        found = json.loads(out.read_text())
    model = Gpt(256, context=CONTEXT, layers=8, heads=4, width=128)
    size = sum(p.nbytes for p in model.parameters())
    print(
        f"{size / 4e6:.2f} M parameters, {DOMAINS} domains, {PROCESSES} processes, a round of T = {steps} steps\n"
        f"{'':26}{'MB in steps':>12}{'at the end':>12}{'counted':>10}{'formula':>9}{'wire':>9}{'time':>8}"
        f"{'held MB':>9}"
    )
    for name, one in found.items():
        plain = found[PLAIN[SETUPS[name][0]]]
        step, ending = expected(name, steps, model)
        total = (one["step"]["total"] + one["round"]["total"]) / plain["step"]["total"]
        print(
            f"{name:26}{one['step']['total'] / 1e6:12.1f}{one['round']['total'] / 1e6:12.2f}{total:9.4f}x"
            f"{(step + ending).total / plain['step']['total']:8.4f}x{one['wire'] / plain['wire']:8.4f}x"
            f"{one['seconds'] / plain['seconds']:7.2f}x{one['held'] / 1e6:9.2f}"
        )


def predict() -> None:
    """LLaMA's shape of 7 B parameters, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    processes, domains = 64, 30
    horizon = stochastic_horizon(10_000)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())
    parameters = Parameters.of(model, torch.optim.AdamW(model.parameters()))
    size = sum(p.nbytes for p in parameters.tensors)
    projections = Projections(parameters, RANK, 0)
    traces = {
        "dense": domains * size,
        "bfloat16": domains * size // 2,
        "projected": 2 * domains * projections.size * 4 + projections.nbytes,
    }
    print(
        f"\n{size / 4e9:.2f} B parameters, {domains} domains, {processes} processes, T = {horizon} "
        f"(formula; float32, GB sent by each process)\n"
        f"{'':26}{'plain step':>11}{'step':>9}{'round':>9}{'in all':>9}{'traces held, GB':>17}"
    )
    for name, (way, kind) in SETUPS.items():
        if kind == "plain":
            continue
        training = TrafficModel(
            "ddp" if way == "ddp" else "fsdp",
            size=size,
            tensors=len(parameters),
            domains=domains,
            world_size=processes,
            mixed=kind == "projected",
            projected=projections.size if kind == "projected" else 0,
            preconditioned=True,
        )
        held = traces[kind] / (processes if way == "fsdp" and kind == "dense" else 1)
        print(
            f"{name:26}{training.plain_step.sent(processes) / 1e9:11.1f}"
            f"{training.step.sent(processes) / 1e9:9.1f}{training.round().sent(processes) / 1e9:9.1f}"
            f"{training.ratio(horizon):8.3f}x{held / 1e9:17.2f}"
        )


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--steps", type=int, default=128, help="of a round")
    parser.add_argument("--here", action="store_true", help="in the network of this machine")
    options = parser.parse_args()
    apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "-"]
    if not options.here and shutil.which("unshare") and shutil.which("ip"):
        again = [sys.executable, __file__, "--here", "--steps", str(options.steps)]
        if subprocess.run([*apart, *again]).returncode == 0:
            return
        print("no network namespace could be made; the wire is that of this machine")
    measure(options.steps)
    predict()


if __name__ == "__main__":
    main()
