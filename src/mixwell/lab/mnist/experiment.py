"""The paper's experiment: rotated, noisy and vanilla MNIST, with a rotated validation set (appendix F).

Three domains of 12,000 training images each: *vanilla*; *rotated*, by a random angle that is drawn afresh
whenever an image is drawn (the paper's "rotation augmentation"); *noisy*, where a share of the labels is
wrong. The validation set is 3,000 test images under one fixed rotation, so the rotated domain serves it
best. A small network is trained by SGD; the weights follow Algorithm 3 with ``H = gamma I``. The paper does
not give the range of the rotation, the fixed angle and the noise rate; they are settings here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mixwell.lab.mnist.mnist_data import DEVIATION, MEAN, Mnist
from mixwell.mixer import state
from mixwell.mixer.mixer import Mixer
from mixwell.mixer.row_counts import ROWS_IGNORE_WEIGHTS
from mixwell.signals import Hypergradient
from mixwell.training.engines import StoppedError
from mixwell.training.models.cnn import small_cnn

VANILLA, ROTATED, NOISY = DOMAINS = ("vanilla", "rotated", "noisy")
VALIDATION = "validation"
CHECKPOINT_SECONDS = 60.0
COURSE_POINTS = 200
Batch = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Setting:
    """One run of the experiment. The defaults are the paper's, where it gives them.

    Args:
        budget: N, training steps.
        horizon: T, steps per weight update.
        seed: of the subsets, the noise, the network and the batches.
        channels: c, the width of the network.
        batch_size: images per domain and step, and of a validation gradient.
        learning_rate: eta, of the network.
        step_size: alpha, of the weights.
        curvature: gamma of ``H = gamma I``.
        train_size: images per domain.
        validation_size: images of the validation set.
        rotation: the rotated domain's angles are uniform in +- this many degrees.
        validation_angle: of every validation image, in degrees.
        noise_rate: the share of wrong labels in the noisy domain.

    Raises:
        ValueError: a number is out of range.
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
class Outcome:
    """What one run came to.

    Args:
        validation_loss: mean cross-entropy on the validation set.
        validation_accuracy: share of right answers there.
        test_loss: mean cross-entropy on the rest of the test images, under the same rotation.
        test_accuracy: share of right answers there.
        last: final weights by domain.
        average: the average of the weights over the run.
        course: ``(step, weights)`` after some of the rounds, at most :data:`COURSE_POINTS`, the first and last
            among them.
        seconds: of training.
    """

    validation_loss: float
    validation_accuracy: float
    test_loss: float
    test_accuracy: float
    last: dict[str, float]
    average: dict[str, float]
    course: list[tuple[int, dict[str, float]]]
    seconds: float


@final
class Domains:
    """The three domains and the validation set of one seed, and the batches drawn from them.

    Each has a stream of its own, so a run with another horizon trains on the same batches.

    Args:
        mnist: the images.
        setting: sizes, angles, noise rate and seed.
    """

    def __init__(self, mnist: Mnist, setting: Setting) -> None:
        self._setting = setting
        chooser = torch.Generator().manual_seed(setting.seed)
        size, taken = setting.train_size, setting.validation_size
        train = torch.randperm(len(mnist.train_labels), generator=chooser)
        test = torch.randperm(len(mnist.test_labels), generator=chooser)
        self._pixels: dict[str, Tensor] = {}
        self._labels: dict[str, Tensor] = {}
        for index, name in enumerate(DOMAINS):
            rows = train[index * size : (index + 1) * size]
            self._pixels[name] = mnist.train_images[rows]
            self._labels[name] = mnist.train_labels[rows]
        self._labels[NOISY] = with_wrong_labels(self._labels[NOISY], setting.noise_rate, chooser)
        self._pixels[VALIDATION] = mnist.test_images[test[:taken]]
        self._labels[VALIDATION] = mnist.test_labels[test[:taken]]
        self._test = mnist.test_images[test[taken:]], mnist.test_labels[test[taken:]]
        self.streams = {
            name: torch.Generator().manual_seed(1000 * (setting.seed + 1) + index)
            for index, name in enumerate((*DOMAINS, VALIDATION))
        }
        """Generators of the batches, by domain; their states are the run's place in its data."""

    def draw(self, name: str, rows: int | None = None) -> Batch:
        """A random batch (with replacement).

        Args:
            name: of the domain, or ``"validation"``.
            rows: its size, by default the setting's.

        Returns:
            Preprocessed images of shape ``(rows, 1, 28, 28)`` and labels.
        """
        stream, labels = self.streams[name], self._labels[name]
        chosen = torch.randint(len(labels), (rows or self._setting.batch_size,), generator=stream)
        return self._prepare(name, self._pixels[name][chosen], stream), labels[chosen]

    def validation(self) -> Batch:
        """The whole validation set."""
        return self._prepare(VALIDATION, self._pixels[VALIDATION], None), self._labels[VALIDATION]

    def test(self) -> Batch:
        """The test images that are not in the validation set, under its rotation."""
        return self._prepare(VALIDATION, self._test[0], None), self._test[1]

    def _prepare(self, name: str, pixels: Tensor, stream: torch.Generator | None) -> Tensor:
        images = pixels.unsqueeze(1).float() / 255
        if name == ROTATED:
            images = rotate(
                images, (2 * torch.rand(len(images), generator=stream) - 1) * self._setting.rotation
            )
        elif name == VALIDATION:
            images = rotate(images, torch.full((len(images),), self._setting.validation_angle))
        return (images - MEAN) / DEVIATION


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Images turned counter-clockwise about their center, bilinear, black outside.

    Args:
        images: shape ``(rows, channels, height, width)``.
        degrees: one angle for each, shape ``(rows,)``.

    Returns:
        Images of the same shape.
    """
    angle = torch.deg2rad(degrees)
    cosine, sine, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    # Maps places of the result to places of the input, with y downwards.
    matrix = torch.stack([torch.stack([cosine, -sine, zero], -1), torch.stack([sine, cosine, zero], -1)], 1)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def with_wrong_labels(labels: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Labels of which a share is replaced by a uniformly drawn wrong one (symmetric noise).

    Args:
        labels: of ten classes.
        rate: the probability with which each is replaced.
        generator: of the noise.

    Returns:
        New labels.
    """
    wrong = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    return torch.where(torch.rand(labels.shape, generator=generator) < rate, wrong, labels)


@final
class Run:
    """One run, which can be stopped after any step and continued from its checkpoint, bit for bit.

    Args:
        setting: of the run.
        mnist: the images.
        checkpoint: a file to continue from if it is there, and to save to; ``None`` for none.
    """

    def __init__(self, setting: Setting, mnist: Mnist, *, checkpoint: Path | None = None) -> None:
        self.setting = setting
        self._domains = Domains(mnist, setting)
        torch.manual_seed(setting.seed)
        self._network = small_cnn(setting.channels)
        optimizer = torch.optim.SGD(self._network.parameters(), lr=setting.learning_rate)
        self.mixer = Mixer(
            self._network,
            optimizer,
            DOMAINS,
            budget=setting.budget,
            horizon=setting.horizon,
            signal=Hypergradient(setting.curvature, points=1),
            update=setting.step_size,
        )
        """The mixer of the run."""
        self._seconds = 0.0
        self._checkpoint = checkpoint
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)

    def finish(
        self,
        *,
        report: Callable[[int], None] = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Train to the end of the budget.

        Args:
            report: told the number of steps done, after each.
            stopping: asked after each step whether to save and stop.

        Returns:
            What came of it.

        Raises:
            StoppedError: ``stopping`` said so; the checkpoint was saved.
        """
        saved = time.perf_counter()
        while self.mixer.steps_done < self.setting.budget:
            begun = time.perf_counter()
            self._step()
            self._seconds += time.perf_counter() - begun
            report(self.mixer.steps_done)
            stop = stopping()
            if self._checkpoint and (stop or time.perf_counter() - saved > CHECKPOINT_SECONDS):
                self._save(self._checkpoint)
                saved = time.perf_counter()
            if stop:
                raise StoppedError
        return self._outcome()

    def _step(self) -> None:
        for name in DOMAINS:
            with self.mixer.domain(name):
                self._loss(self._domains.draw(name)).backward()
        self.mixer.step()
        if self.mixer.validation_due:
            with warnings.catch_warnings(), self.mixer.validation():
                # The paper has batches of the same size for all domains.
                warnings.filterwarnings("ignore", message=ROWS_IGNORE_WEIGHTS)
                self._loss(self._domains.draw(VALIDATION)).backward()

    def _loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self._network(batch[0]), batch[1])

    def _outcome(self) -> Outcome:
        validation_loss, validation_accuracy = evaluate(self._network, self._domains.validation())
        test_loss, test_accuracy = evaluate(self._network, self._domains.test())
        weights = self.mixer.weights
        return Outcome(
            validation_loss=validation_loss,
            validation_accuracy=validation_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            last=weights.last,
            average=weights.average,
            course=self._course(),
            seconds=self._seconds,
        )

    def _course(self) -> list[tuple[int, dict[str, float]]]:
        rounds = self.mixer.rounds
        points = [(0, rounds[0].weights)] + [(r.first_step + r.steps, r.new_weights) for r in rounds]
        keep = torch.linspace(0, len(points) - 1, min(COURSE_POINTS, len(points))).round().int().tolist()
        return [points[index] for index in keep]

    def _save(self, path: Path) -> None:
        mixer = self.mixer.state_dict()
        tensors = {f"mixer.{name}": tensor for name, tensor in mixer.pop("tensors").items()}
        tensors |= {f"network.{name}": tensor for name, tensor in self._network.state_dict().items()}
        tensors |= {f"stream.{name}": stream.get_state() for name, stream in self._domains.streams.items()}
        plain: dict[str, Any] = {"setting": asdict(self.setting), "mixer": mixer, "seconds": self._seconds}
        state.write(path, {**plain, "tensors": tensors})

    def _load(self, path: Path) -> None:
        saved = state.read(path)
        if saved["setting"] != asdict(self.setting):
            raise ValueError(f"{path} is of a run with other settings; remove it to start again")

        def part(prefix: str) -> dict[str, Tensor]:
            tensors: dict[str, Tensor] = saved["tensors"]
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        self._network.load_state_dict(part("network."))
        for name, stream in part("stream.").items():
            self._domains.streams[name].set_state(stream)
        self.mixer.load_state_dict({**saved["mixer"], "tensors": part("mixer.")})
        self._seconds = float(saved["seconds"])


@torch.no_grad()
def evaluate(network: nn.Module, batch: Batch, *, rows: int = 500) -> tuple[float, float]:
    """Mean cross-entropy and accuracy.

    Args:
        network: gives logits.
        batch: images and labels.
        rows: computed at a time.

    Returns:
        The loss and the share of right answers; NaN for no images.
    """
    loss = right = 0.0
    for images, labels in zip(batch[0].split(rows), batch[1].split(rows), strict=True):
        logits = network(images)
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        right += float((logits.argmax(1) == labels).sum())
    count = len(batch[1]) or math.nan
    return loss / count, right / count
