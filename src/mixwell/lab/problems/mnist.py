"""Rotated and mislabeled MNIST: a small version of the paper's problem."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.experiment import rotate, with_wrong_labels
from mixwell.lab.packages import Say


def prepare(folder: Path, say: Say) -> None:
    """Fetch the images into the cache, unless they exist."""
    del folder
    mnist_data.load(say=say)


@cache
def digits(
    part: str, rows: int, angle: float = 0.0, spread: float = 0.0, wrong: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return rotated images of shape ``(rows, 1, 28, 28)`` with a fixed angle each, and labels, some wrong.

    Args:
        part: ``vanilla``, ``rotated`` or ``noisy`` (disjoint training images), or ``validation`` or ``test``
            (disjoint test images).
        angle: rotation of all images, in degrees.
        spread: each is rotated by an additional random angle of at most this many degrees.
        wrong: fraction of labels that are replaced by wrong ones.
    """
    places = {"vanilla": 0, "rotated": 1, "noisy": 2, "validation": 0, "test": 1}
    everything = mnist_data.load()
    held_out = part in ("validation", "test")
    images = everything.test_images if held_out else everything.train_images
    labels = everything.test_labels if held_out else everything.train_labels
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=random)
    chosen = order[places[part] * (5_000 if held_out else 20_000) :][:rows]
    found = images[chosen].unsqueeze(1).float() / 255
    turned = angle + spread * (2 * torch.rand(len(found), generator=random) - 1)
    if angle or spread:
        found = rotate(found, turned)
    return (found - mnist_data.MEAN) / mnist_data.DEVIATION, with_wrong_labels(labels[chosen], wrong, random)
