"""Stochastic rounding to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 so that the expectation is the value.

    The lower 16 bits of a float32 are the part that bfloat16 cuts off. Adding a uniform 16-bit number carries
    into the upper bits with the probability of the value's distance from the lower of its two neighbors.

    Args:
        generator: of the random bits, on the value's device.
    """
    noise = torch.randint(
        0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    bits = value.contiguous().view(torch.int32) + noise
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
