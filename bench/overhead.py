"""What mixing costs beside plain training on the same samples: time and memory, as ratios.

MLP 256-1024-1024-10 (1.32 M parameters), 3 domains of 64 rows, rounds of 20 steps, one thread. The plain loop
trains on the concatenated batch with the same optimiser. Variants take turns in one process, so that a busy
machine disturbs all alike; the ratio of each turn is taken, and their median and spread are printed.

    python bench/overhead.py [--turns 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import mixwell
from mixwell import environment

DOMAINS, ROWS, HORIZON = ["a", "b", "c"], 64, 20
SIGNALS: dict[str, Callable[[], mixwell.Signal]] = {
    "dense": mixwell.Hypergradient,
    "bfloat16": lambda: mixwell.Hypergradient(traces=mixwell.BFloat16Traces()),
    "sketched 4096": lambda: mixwell.Hypergradient(traces=mixwell.SketchedTraces(4096)),
    "last layer": lambda: mixwell.Hypergradient(traces=mixwell.SubsetTraces(["4.*"])),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def batches() -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(1)
    return [
        {name: (torch.randn(ROWS, 256), torch.randint(0, 10, (ROWS,))) for name in DOMAINS}
        for _ in range(HORIZON)
    ]


def plain_round(optimizer_name: str) -> Callable[[], None]:
    model, data = mlp(), batches()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    joined = [tuple(torch.cat([b[i] for b in step.values()]) for i in range(2)) for step in data]

    def run() -> None:
        for x, y in joined:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def mixed_round(optimizer_name: str, signal: mixwell.Signal) -> tuple[Callable[[], None], mixwell.Mixer]:
    model, data = mlp(), batches()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    mixer = mixwell.Mixer(model, optimizer, DOMAINS, horizon=HORIZON, signal=signal)

    def run() -> None:
        for step in data:
            for name, (x, y) in step.items():
                with mixer.domain(name):
                    nn.functional.cross_entropy(model(x), y).backward()
            mixer.step()
        with mixer.validation():
            x, y = data[0]["a"]
            nn.functional.cross_entropy(model(x), y).backward()
        mixer.update()

    return run, mixer


def seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("bench/results/overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = sum(p.nbytes for p in mlp().parameters())
    results = []
    for optimizer in OPTIMIZERS:
        plain = plain_round(optimizer)
        mixed = {name: mixed_round(optimizer, make()) for name, make in SIGNALS.items()}
        ratios: dict[str, list[float]] = {name: [] for name in mixed}
        for turn in range(options.turns + 1):
            base = seconds(plain)
            for name, (run, _) in mixed.items():
                ratio = seconds(run) / base
                if turn:  # the first turn warms up
                    ratios[name].append(ratio)
        for name, (_, mixer) in mixed.items():
            found = ratios[name]
            memory = mixer.nbytes / size
            print(
                f"{optimizer:6} {name:14} time {statistics.median(found):.2f}x plain "
                f"({min(found):.2f}-{max(found):.2f})   memory held {memory:.2f} x parameters",
                flush=True,
            )
            results.append(
                {
                    "optimizer": optimizer,
                    "traces": name,
                    "time_ratios": found,
                    "memory_over_parameters": memory,
                }
            )
    made_with = environment.describe(["python", "bench/overhead.py"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"environment": made_with, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
