"""The paper's convolutional network for images of 28 x 28 pixels (appendix F)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.training.models import inputs
from mixwell.training.models.base import MODELS, ModelConfig, ModelSize, Trainable
from mixwell.utils.sections import Whole


@final
@MODELS.register("cnn")
class CnnConfig(ModelConfig):
    """The paper's convolutional network, for images of 28 x 28 pixels."""

    kind: str = "cnn"
    channels: Whole = 32
    classes: Whole = 10

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        model = small_cnn(self.channels, classes=self.classes)
        check = partial(
            inputs.check_rows,
            checked=inputs.labeled_images,
            column=1,
            limit=self.classes,
            what="classes (model.classes)",
        )
        loss, row_losses = (
            inputs.with_checks(one, inputs.labeled_images, "a class is")
            for one in (classification_loss, classification_losses)
        )
        return Trainable(model, loss, row_losses=row_losses, check_rows=check)

    @override
    def size(self, vocabulary: int) -> ModelSize:
        c, classes = self.channels, self.classes
        parameters = 10 * c + (18 * c + 2) * c + (98 * c + 1) * 128 + 129 * classes
        return ModelSize(parameters, activations=28 * 28 * c + 14 * 14 * 2 * c + 2 * classes, modules=10)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of labels; the model gives logits of shape ``(rows, classes)``."""
    return classification_losses(model, batch).mean()


def classification_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of the label of each row, shape ``(rows,)``."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).float(), labels, reduction="none")


def small_cnn(channels: int = 32, *, classes: int = 10) -> nn.Sequential:
    """Two convolutions with pooling, then two linear layers.

    conv 3x3 (c), ReLU, max-pool, conv 3x3 (2c), ReLU, max-pool, linear (128), ReLU, linear (classes).
    Pooling is done before the ReLU: the two commute, and the ReLU then sees a quarter of the values.

    It takes inputs of shape ``(rows, 1, 28, 28)``, in the memory format that is fast on CPUs.

    Args:
        channels: c, the width.

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
