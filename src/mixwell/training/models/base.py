"""What is trained: a model with its losses, and the registry of config sections that build one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, final

from torch import Tensor, nn
from torch.nn import functional

from mixwell.data.datasets import IndexedDataset
from mixwell.training.models import inputs
from mixwell.typing import LossFn
from mixwell.utils.registry import Registry
from mixwell.utils.sections import ConfigSection


@final
@dataclass(frozen=True)
class Trainable:
    """A model and its losses.

    Args:
        loss: ``loss(model, batch)``, the mean over the rows.
        context: tokens of a row, where the rows are text.
        vocabulary: the number of tokens, where the rows are text and it matters.
        row_losses: the loss of every row of a batch, shape ``(rows,)``; ``None`` where only their mean is known.
        token_losses: the loss of every token, shape ``(rows, length)``, where the rows are text.
        check_rows: raises ``ValueError`` for rows that the model cannot take.
    """

    model: nn.Module
    loss: LossFn
    context: int | None = None
    vocabulary: int | None = None
    row_losses: LossFn | None = None
    token_losses: LossFn | None = None
    check_rows: Callable[[IndexedDataset], None] | None = None

    @classmethod
    def language_model(cls, model: nn.Module, losses: LossFn, *, context: int, vocabulary: int) -> Trainable:
        """Return a language model with the loss of each token; rows that it cannot take are refused.

        Args:
            losses: shape ``(rows, length)``.
        """
        checked = partial(inputs.token_rows, context=context)
        each = inputs.with_checks(losses, checked, "a token is")

        def row_losses(model: nn.Module, rows: Tensor) -> Tensor:
            return each(model, rows).mean(dim=1)

        def loss(model: nn.Module, rows: Tensor) -> Tensor:
            return row_losses(model, rows).mean()

        check = partial(inputs.check_rows, checked=checked, column=0, limit=vocabulary, what="tokens")
        return cls(model, loss, context, vocabulary, row_losses, each, check)


@final
@dataclass(frozen=True)
class ModelSize:
    """What a model takes, counted from its settings: numbers of 4 bytes, never more than it really takes.

    Args:
        parameters: numbers that are trained.
        buffers: numbers that are not.
        activations: numbers that the backward pass of one row needs.
        modules: layers and their containers.
    """

    parameters: int
    buffers: int = 0
    activations: int = 0
    modules: int = 0


class ModelConfig(ConfigSection):
    """The section ``model`` of a config. A subclass adds the settings of a kind of model."""

    is_language_model: ClassVar[bool] = False
    """Whether it is a transformer on tokens, for which projected traces are the default."""

    kind: str
    """The kind of model."""

    @abstractmethod
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        """Build the model, with new (or its own) weights.

        Args:
            base: the folder to which relative paths refer.
            vocabulary: the number of tokens of the tokenizer.
        """

    def size(self, vocabulary: int) -> ModelSize | None:
        """Return what the model will take; ``None`` where the settings do not say."""
        return None


MODELS = Registry[type[ModelConfig]]("model", package="mixwell.training.models")
"""Config sections by the key ``model.kind``."""


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token given those before it, in nats.

    Args:
        model: gives logits of shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.
    """
    return next_token_losses(model, rows).mean()


def next_token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean over the tokens of each row, shape ``(rows,)``; see :func:`next_token_loss`."""
    return next_token_each(model, rows).mean(dim=1)


def next_token_each(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss of each token, shape ``(rows, length)``; see :func:`next_token_loss`."""
    return token_losses(model(rows[:, :-1]), rows)


def token_losses(logits: Tensor, rows: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first of a row, shape ``(rows, length)``.

    Args:
        logits: shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.
    """
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1)
