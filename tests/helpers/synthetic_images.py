"""Images in the shape of MNIST that are drawn from a seed, for runs without downloads."""

from __future__ import annotations

import torch
from torch import Tensor

from mixwell.lab.mnist.experiment import rotate, with_wrong_labels
from mixwell.lab.mnist.mnist_data import DEVIATION, MEAN, Mnist

PARTS = ("vanilla", "rotated", "noisy", "validation", "test")


def bars(rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with one bright row of pixels, whose height is the label; uint8."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    images = torch.randint(0, 80, (rows, 28, 28), generator=generator)
    images[torch.arange(rows), 4 + 2 * labels] = 255
    return images.to(torch.uint8), labels


def in_place_of_mnist(train: int = 300, test: int = 100) -> Mnist:
    return Mnist(*bars(train, seed=0), *bars(test, seed=1))


def digits(
    part: str, rows: int, angle: float = 0.0, spread: float = 0.0, wrong: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Takes what the function takes that the config of the embedded problem ``mnist`` names."""
    generator = torch.Generator().manual_seed(0)
    images, labels = bars(rows, seed=2 + PARTS.index(part))
    turned = angle + spread * (2 * torch.rand(rows, generator=generator) - 1)
    found = rotate(images.unsqueeze(1).float() / 255, turned)
    return (found - MEAN) / DEVIATION, with_wrong_labels(labels, wrong, generator)
