"""How close the hypergradient estimates are to the exact ones of the same T steps of the real optimizer.

Two-layer networks (10-32-4, tanh, float64), 3 domains of 16 rows, 12 seeds. Exact: central differences of the
whole run by every weight. Printed: tangent cosine (median and worst seed) and median relative error.

    python bench/fidelity.py [--seeds 12] [--horizons 5,20,50]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import plain_parser
from torch import nn

import mixwell

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD .02": lambda p: torch.optim.SGD(p, lr=0.02),
    "SGD .1": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD .02 momentum .9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "SGD .02 Nesterov .9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam .003": lambda p: torch.optim.Adam(p, lr=3e-3),
    "AdamW .003 wd .1": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
}
SIGNALS: dict[str, Callable[[], mixwell.Signal]] = {
    "first order": lambda: mixwell.Hypergradient(points=1),
    "forward mode": lambda: mixwell.Hypergradient(traces=mixwell.ForwardModeTraces(), points=1),
}
Batch = tuple[torch.Tensor, torch.Tensor]


def problem(seed: int, steps: int) -> tuple[nn.Module, list[dict[str, Batch]], Batch]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    maps = {name: normal(10, 4) * 0.5 for name in "abc"}

    def draw(matrix: torch.Tensor) -> Batch:
        x = normal(16, 10)
        return x, torch.tanh(x @ matrix) + 0.1 * normal(16, 4)

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    batches = [{name: draw(matrix) for name, matrix in maps.items()} for _ in range(steps)]
    return model, batches, draw(0.8 * maps["b"] + 0.2 * maps["a"])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def reports(optimizer: str, signal: str, *, start: int, horizon: int, seeds: int) -> list[mixwell.Fidelity]:
    found = []
    for seed in range(seeds):
        model, batches, validation = problem(seed, start + horizon)
        trained = OPTIMIZERS[optimizer](model.parameters())
        for step in batches[:start]:
            trained.zero_grad()
            for batch in step.values():
                (loss(model, batch) / 3).backward()
            trained.step()
        found.append(
            mixwell.measure_fidelity(
                model, trained, loss, batches[start:], validation, signal=SIGNALS[signal], difference=1e-4
            )
        )
    return found


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--horizons", default="5,20,50")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'optimizer':22}{'traces':14}{'start':>6}{'T':>5}{'median cos':>12}{'worst':>8}{'rel. error':>12}"
    )
    for optimizer in OPTIMIZERS:
        for start in (0, 20):
            for horizon in (int(h) for h in options.horizons.split(",")):
                for signal in SIGNALS:
                    found = reports(optimizer, signal, start=start, horizon=horizon, seeds=options.seeds)
                    cosines = [r.cosine for r in found]
                    error = statistics.median(r.relative_error for r in found)
                    print(
                        f"{optimizer:22}{signal:14}{start:6d}{horizon:5d}{statistics.median(cosines):12.4f}"
                        f"{min(cosines):8.3f}{error:12.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
