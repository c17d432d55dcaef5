"""Rows of three sources of regression data, for the tests of integrations."""

from __future__ import annotations

import torch
from torch import Tensor

SOURCES = ("clean", "shifted", "noisy")


def draw(source: str, rows: int) -> list[dict[str, Tensor]]:
    """Rows of one source; "noisy" has labels that mean nothing."""
    generator = torch.Generator().manual_seed(SOURCES.index(source))
    x, noise = torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)
    maps = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(7))
    y = noise * 2 if source == "noisy" else torch.tanh(x @ maps[SOURCES.index(source)])
    return [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]
