"""MNIST, turned and mislabeled: the paper's problem in small."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.experiment import rotate, with_wrong_labels
from mixwell.lab.problems.packages import Say


def prepare(folder: Path, say: Say) -> None:
    """Fetch the images into the cache, unless they are there.

    Args:
        folder: nothing is written there.
        say: told what is fetched.
    """
    del folder
    mnist_data.load(say=say)


@cache
def digits(
    part: str, rows: int, angle: float = 0.0, spread: float = 0.0, wrong: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Images of MNIST, turned, some with wrong labels. Every image has one angle, however often it is drawn.

    Args:
        part: ``vanilla``, ``rotated`` or ``noisy`` (of the training images, none in two of them), or
            ``validation`` or ``test`` (of the test images, likewise).
        rows: how many.
        angle: by which all are turned, in degrees.
        spread: each is turned by a random angle of at most so many degrees more or less.
        wrong: the share of labels that are replaced by wrong ones.

    Returns:
        Images of shape ``(rows, 1, 28, 28)``, and labels.
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
