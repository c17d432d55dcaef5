"""The state of every random generator that a run or a user's code may draw from."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

Plain = dict[str, Any]


def state(device: torch.device) -> tuple[Plain, dict[str, Tensor]]:
    """Return the state of PyTorch (also on the device), NumPy and Python: plain values, and tensors by name."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    plain = {
        "python": [version, list(numbers), gauss_next],
        "numpy": [kind, int(place), int(has_gauss), float(gauss)],
    }
    return plain, tensors


def load_state(plain: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Load the result of :func:`state`."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    kind, place, has_gauss, gauss = plain["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = plain["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def seed(number: int) -> None:
    """Seed PyTorch, NumPy and Python."""
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore the generators on the CPU afterwards: loggers may draw, and must not change a run."""
    cpu = torch.device("cpu")
    kept = state(cpu)
    try:
        yield
    finally:
        load_state(*kept, cpu)
