"""Problems that need no files of one's own: ``mixwell compare demo`` and ``mixwell compare mnist``."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from mixwell import files
from mixwell.data import mnist
from mixwell.experiments.demo import command as demo
from mixwell.experiments.demo import corpus
from mixwell.experiments.mnist.experiment import rotate, with_wrong_labels
from mixwell.terminal import say

EMBEDDED = ("demo", "mnist")


def find(name: str, out: Path, console: Console) -> Path:
    """The config of a problem.

    Args:
        name: the path of a config, or the name of an embedded problem, whose config (and text) is written.
        out: the folder of the comparison.
        console: where to report.

    Returns:
        The path of a config.

    Raises:
        ValueError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if name not in EMBEDDED:
        raise ValueError(
            f"there is no config {name}; give the path of one (`mixwell init` writes one to start from), or the "
            f"name of an embedded problem: {', '.join(EMBEDDED)}"
        )
    path = out / f"{name}.yaml"
    if name == "demo" and not (out / "data" / f"{corpus.TEST}.txt").exists():
        say(console, f"writing text from this Python installation to {out / 'data'}")
        corpus.write(out / "data")
    if not path.exists():
        config = demo.default_config() if name == "demo" else _own("mnist.yaml")
        files.write(path, config + _own("variants.yaml"))
    return path


def _own(name: str) -> str:
    return resources.files("mixwell.experiments.compare").joinpath(name).read_text("utf-8")


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
    everything = mnist.load()
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
    return (found - mnist.MEAN) / mnist.DEVIATION, with_wrong_labels(labels[chosen], wrong, random)
