"""The paper's convolutional network for images of 28 x 28 pixels (appendix F)."""

from __future__ import annotations

import torch
from torch import nn


def small_cnn(channels: int = 32, *, classes: int = 10) -> nn.Sequential:
    """Two convolutions with pooling, then two linear layers.

    conv 3x3 (c), ReLU, max-pool, conv 3x3 (2c), ReLU, max-pool, linear (128), ReLU, linear (classes).
    Pooling is done before the ReLU: the two commute, and the ReLU then sees a quarter of the values.

    Args:
        channels: c, the width.
        classes: of the labels.

    Returns:
        The network, for inputs of shape ``(rows, 1, 28, 28)``, in the memory format that is fast on CPUs.

    Raises:
        ValueError: the width is below one.

    Example:
        >>> sum(p.numel() for p in small_cnn(32).parameters())
        421642
    """
    if channels < 1:
        raise ValueError(f"the network needs at least 1 channel, got {channels}")
    network = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
