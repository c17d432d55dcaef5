"""A small run of any method of the registry, on rows that are drawn from a seed.

What these runs give is recorded in ``tests/golden``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from mixwell import methods
from mixwell.data.datasets import as_rows
from mixwell.training import config_io
from mixwell.training.models.base import Trainable
from mixwell.training.run import Run

ROWS = {"a": 96, "b": 64, "c": 80}
STEPS, BATCH = 12, 12
# Few and short trials, so that a test takes seconds.
OPTIONS: dict[str, dict[str, Any]] = {
    "regmix": {"proxies": 6, "proxy_steps": 2, "samples": 500, "top": 10},
    "mixing-laws": {"proxies": 8, "proxy_steps": 2, "starts": 2},
    "tikmix-m": {"candidates": 12},
}


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return losses_of(model, batch).mean()


Data = dict[str, tuple[Tensor, Tensor]]


def data() -> Data:
    """Two classes apart in the direction of (1, 1, 0); in domain b half of the labels are wrong."""
    random = torch.Generator().manual_seed(0)

    def draw(count: int, wrong: float = 0.0) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 3, generator=random)
        labels = (inputs[:, 0] + inputs[:, 1] > 0).long()
        flipped = torch.rand(count, generator=random) < wrong
        return inputs, torch.where(flipped, 1 - labels, labels)

    domains = {name: draw(count, wrong=0.5 if name == "b" else 0.0) for name, count in ROWS.items()}
    return {**domains, "validation": draw(48)}


def run_of(
    out: Path,
    method: str,
    *,
    floor: float = 0.0,
    horizon: int | str = "auto",
    order: str = "abc",
    options: dict[str, Any] | None = None,
    stopping: Callable[[], bool] = lambda: False,
    rows: Data | None = None,
    counts: str = "weight",
    knows_rows: bool = True,
) -> Run:
    rows = rows or data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain: dict[str, Any] = {
        "domains": {name: {"given": "tuple"} for name in order},
        "model": {"kind": "given", "name": "Sequential"},
        "steps": STEPS,
        "batch": {"rows": BATCH, "counts": counts},
        "mixer": {
            "method": method,
            "horizon": horizon,
            "floor": floor,
            "options": {**OPTIONS.get(method, {}), **(options or {})},
        },
    }
    given = {f"domains.{name}": as_rows(rows[name]) for name in order}
    if "validation" in rows:
        plain["validation"] = {"given": "tuple"}
        given["validation"] = as_rows(rows["validation"])
    return Run(
        config_io.validate_config(plain),
        out,
        console=Console(quiet=True),
        trainable=Trainable(model, loss_of, row_losses=losses_of if knows_rows else None),
        given=given,
        stopping=stopping,
    )


def online(name: str) -> dict[str, Any]:
    """Options with which the weights are learned in the last run itself."""
    return {"transfer": False} if "transfer" in methods.find(name).options.model_fields else {}
