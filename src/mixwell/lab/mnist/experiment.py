"""The paper's experiment: rotated, noisy and vanilla MNIST, with a rotated validation set (appendix F).

Three domains of 12,000 training images each: *vanilla*; *rotated*, by a random angle that is drawn afresh
whenever an image is drawn (the paper's "rotation augmentation"); *noisy*, where a fraction of the labels is
wrong. The validation set is 3,000 test images under one fixed rotation, so the rotated domain serves it
best. A small network is trained by SGD; the weights follow Algorithm 3 with ``H = gamma I``. The paper does
not give the range of the rotation, the fixed angle and the noise rate; they are settings here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mixwell.lab.mnist.mnist_data import DEVIATION, MEAN, Mnist
from mixwell.mixer.mixer import Mixer
from mixwell.mixer.row_counts import ROWS_IGNORE_WEIGHTS
from mixwell.signals import Hypergradient
from mixwell.training.engines import StoppedError
from mixwell.training.models.cnn import small_cnn

VANILLA, ROTATED, NOISY = DOMAINS = ("vanilla", "rotated", "noisy")
VALIDATION = "validation"
HISTORY_POINTS = 200
Batch = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class MnistSettings:
    """One run of the experiment. The defaults are the paper's, where it gives them.

    Args:
        budget: N, training steps.
        horizon: T, steps per weight update.
        seed: seed of the subsets, the noise, the network and the batches.
        channels: c, the width of the network.
        batch_size: images per domain and step, and per validation gradient.
        learning_rate: eta of the network.
        step_size: alpha of the weights.
        curvature: gamma of ``H = gamma I``.
        train_size: images per domain.
        rotation: the rotated domain's angles are uniform in +- this many degrees.
        validation_angle: rotation of every validation image, in degrees.
        noise_rate: fraction of wrong labels in the noisy domain.

    Raises:
        ValueError: A number is out of range.
    """

    budget: int
    horizon: int
    seed: int
    channels: int = 32
    batch_size: int = 256
    learning_rate: float = 0.05
    step_size: float = 0.5
    curvature: float = 0.01
    train_size: int = 12_000
    validation_size: int = 3_000
    rotation: float = 90.0
    validation_angle: float = 45.0
    noise_rate: float = 0.5

    def __post_init__(self) -> None:
        for name in ("budget", "horizon", "channels", "batch_size", "train_size", "validation_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "step_size"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("curvature", "rotation", "validation_angle"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        if self.horizon > self.budget:
            raise ValueError(f"the horizon must be at most the budget of {self.budget}, got {self.horizon}")
        if 3 * self.train_size > 60_000:
            raise ValueError(f"MNIST has 60,000 training images, too few for three times {self.train_size}")
        if self.validation_size > 10_000:
            raise ValueError(f"MNIST has 10,000 test images, fewer than {self.validation_size}")
        if not 0 <= self.noise_rate <= 1:
            raise ValueError(f"noise_rate must be between 0 and 1, got {self.noise_rate}")


@final
@dataclass(frozen=True)
class MnistResult:
    """The result of one run.

    Args:
        validation_loss: mean cross-entropy on the validation set.
        test_loss: mean cross-entropy on the rest of the test images, under the same rotation.
        last: final weights by domain.
        average: weights averaged over the run.
        history: ``(step, weights)`` after at most :data:`HISTORY_POINTS` of the rounds, including the first
            and the last.
        seconds: training time.
    """

    validation_loss: float
    validation_accuracy: float
    test_loss: float
    test_accuracy: float
    last: dict[str, float]
    average: dict[str, float]
    history: list[tuple[int, dict[str, float]]]
    seconds: float


@final
class Domains:
    """The three domains and the validation set of one seed, and the batches drawn from them.

    Each has its own random stream, so a run with another horizon trains on the same batches.
    """

    def __init__(self, mnist: Mnist, settings: MnistSettings) -> None:
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        size, validation = settings.train_size, settings.validation_size
        train = torch.randperm(len(mnist.train_labels), generator=generator)
        test = torch.randperm(len(mnist.test_labels), generator=generator)
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        for index, name in enumerate(DOMAINS):
            rows = train[index * size : (index + 1) * size]
            self._pixels[name] = mnist.train_images[rows]
            self._labels[name] = mnist.train_labels[rows]
        self._labels[NOISY] = with_wrong_labels(self._labels[NOISY], settings.noise_rate, generator)
        self._pixels[VALIDATION] = mnist.test_images[test[:validation]]
        self._labels[VALIDATION] = mnist.test_labels[test[:validation]]
        self._test = mnist.test_images[test[validation:]], mnist.test_labels[test[validation:]]
        self._streams = {
            name: torch.Generator().manual_seed(1000 * (settings.seed + 1) + index)
            for index, name in enumerate((*DOMAINS, VALIDATION))
        }

    def draw(self, name: str, rows: int | None = None) -> Batch:
        """Draw a random batch with replacement.

        Args:
            name: a domain, or ``"validation"``.
            rows: batch size, by default that of the settings.

        Returns:
            Normalized images of shape ``(rows, 1, 28, 28)`` and labels.
        """
        stream, labels = self._streams[name], self._labels[name]
        chosen = torch.randint(len(labels), (rows or self._settings.batch_size,), generator=stream)
        return self._prepare(name, self._pixels[name][chosen], stream), labels[chosen]

    def validation(self) -> Batch:
        """Return the whole validation set."""
        return self._prepare(VALIDATION, self._pixels[VALIDATION], None), self._labels[VALIDATION]

    def test(self) -> Batch:
        """Return the test images that are not in the validation set, under its rotation."""
        return self._prepare(VALIDATION, self._test[0], None), self._test[1]

    def _prepare(self, name: str, pixels: Tensor, stream: torch.Generator | None) -> Tensor:
        images = pixels.unsqueeze(1).float() / 255
        if name == ROTATED:
            images = rotate(
                images, (2 * torch.rand(len(images), generator=stream) - 1) * self._settings.rotation
            )
        elif name == VALIDATION:
            images = rotate(images, torch.full((len(images),), self._settings.validation_angle))
        return (images - MEAN) / DEVIATION


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate images counter-clockwise about their center; bilinear, black outside.

    Args:
        images: shape ``(rows, channels, height, width)``.
        degrees: one angle per image, shape ``(rows,)``.

    Returns:
        Images of the same shape.
    """
    angle = torch.deg2rad(degrees)
    cosine, sine, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    # affine_grid maps output to input coordinates, with y downwards.
    matrix = torch.stack([torch.stack([cosine, -sine, zero], -1), torch.stack([sine, cosine, zero], -1)], 1)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def with_wrong_labels(labels: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Replace labels of ten classes, each with probability ``rate``, by a uniformly drawn wrong one."""
    wrong = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    return torch.where(torch.rand(labels.shape, generator=generator) < rate, wrong, labels)


def build(settings: MnistSettings) -> tuple[nn.Module, Mixer]:
    """Build the network and the mixer of a run."""
    torch.manual_seed(settings.seed)
    network = small_cnn(settings.channels)
    mixer = Mixer(
        network,
        torch.optim.SGD(network.parameters(), lr=settings.learning_rate),
        DOMAINS,
        budget=settings.budget,
        horizon=settings.horizon,
        signal=Hypergradient(settings.curvature, points=1, trace_every=1),
        update=settings.step_size,
    )
    return network, mixer


def train(
    network: nn.Module,
    mixer: Mixer,
    domains: Domains,
    *,
    budget: int,
    report: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> MnistResult:
    """Train for ``budget`` steps with Algorithm 3, then evaluate.

    A run that was stopped starts over: it takes minutes, and a sweep keeps the runs that are finished.

    Args:
        network: the network of ``mixer``.
        report: called with the number of steps done, after each.
        stopping: asked after each step whether to stop.

    Raises:
        StoppedError: ``stopping`` returned true.
    """

    def backward(name: str) -> None:
        images, labels = domains.draw(name)
        functional.cross_entropy(network(images), labels).backward()

    begun = time.perf_counter()
    for step in range(1, budget + 1):
        for name in DOMAINS:
            with mixer.domain(name):
                backward(name)
        mixer.step()
        if mixer.validation_due:
            with warnings.catch_warnings(), mixer.validation():
                # The paper has batches of the same size for all domains.
                warnings.filterwarnings("ignore", message=ROWS_IGNORE_WEIGHTS)
                backward(VALIDATION)
        report(step)
        if stopping():
            raise StoppedError
    seconds = time.perf_counter() - begun
    return MnistResult(
        *evaluate(network, domains.validation()),
        *evaluate(network, domains.test()),
        last=mixer.weights.last,
        average=mixer.weights.average,
        history=_history(mixer),
        seconds=seconds,
    )


@torch.no_grad()
def evaluate(network: nn.Module, batch: Batch, *, rows: int = 500) -> tuple[float, float]:
    """Return the mean cross-entropy and the accuracy, computed ``rows`` at a time; NaN for no images."""
    loss = correct = 0.0
    for images, labels in zip(batch[0].split(rows), batch[1].split(rows), strict=True):
        logits = network(images)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        correct += float((logits.argmax(1) == labels).sum())
    count = len(batch[1]) or math.nan
    return loss / count, correct / count


def _history(mixer: Mixer) -> list[tuple[int, dict[str, float]]]:
    rounds = mixer.rounds
    points = [(0, rounds[0].weights)] + [(r.first_step + r.steps, r.new_weights) for r in rounds]
    keep = torch.linspace(0, len(points) - 1, min(HISTORY_POINTS, len(points))).round().int().tolist()
    return [points[index] for index in keep]
