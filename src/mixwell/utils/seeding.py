"""Seeds for a part of a program only."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the CPU generators of PyTorch, NumPy and Python inside, and restore their state afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
