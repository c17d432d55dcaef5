"""The model of a run and the loss that it is trained with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from torch import Tensor, nn
from torch.nn import functional

from mixwell.training import entry_points
from mixwell.training.config import (
    CnnConfig,
    Config,
    GivenConfig,
    GptConfig,
    PythonConfig,
    TransformersConfig,
)
from mixwell.training.models.cnn import small_cnn
from mixwell.training.models.gpt import Gpt
from mixwell.typing import LossFn


@final
@dataclass(frozen=True)
class Trainable:
    """What is trained.

    Args:
        model: the model.
        loss: of the model on a batch, the mean over its rows.
        context: tokens of a row, where the rows are text.
        vocabulary: the number of tokens, where the rows are text and it matters.
        row_losses: the loss of every row of a batch, shape ``(rows,)``; ``None`` where only their mean is known.
        token_losses: the loss of every token, shape ``(rows, length)``, where the rows are text.
    """

    model: nn.Module
    loss: LossFn
    context: int | None = None
    vocabulary: int | None = None
    row_losses: LossFn | None = None
    token_losses: LossFn | None = None


def build(config: Config, *, vocabulary: int) -> Trainable:
    """The model that a config names, with new (or its own) weights.

    Args:
        config: the settings.
        vocabulary: the number of tokens of the tokenizer.

    Returns:
        Model and loss.
    """
    match config.model:
        case GptConfig() as chosen:
            model = Gpt(vocabulary, **chosen.model_dump(exclude={"kind"}))
            return Trainable(
                model, next_token_loss, chosen.context, vocabulary, next_token_losses, next_token_each
            )
        case TransformersConfig() as chosen:
            return _transformers(chosen, base=config.base, vocabulary=vocabulary)
        case CnnConfig() as chosen:
            model = small_cnn(chosen.channels, classes=chosen.classes)
            return Trainable(model, classification_loss, row_losses=classification_losses)
        case PythonConfig() as chosen:
            return _python(chosen, base=config.base)
        case GivenConfig() as chosen:
            raise ValueError(
                f"the model ({chosen.name}) was handed over by Python code: continue with mixwell.train from there"
            )


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean cross-entropy of every token given those before it, in nats.

    Args:
        model: gives logits of shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.

    Returns:
        One number.
    """
    return next_token_losses(model, rows).mean()


def next_token_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """The same for every row: the mean over its tokens.

    Args:
        model: gives logits of shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.

    Returns:
        Shape ``(rows,)``.
    """
    return next_token_each(model, rows).mean(dim=1)


def next_token_each(model: nn.Module, rows: Tensor) -> Tensor:
    """The same for every token.

    Args:
        model: gives logits of shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.

    Returns:
        Shape ``(rows, length)``.
    """
    return _token_losses(model(rows[:, :-1]), rows)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of labels.

    Args:
        model: gives logits of shape ``(rows, classes)``.
        batch: inputs and labels.

    Returns:
        One number.
    """
    return classification_losses(model, batch).mean()


def classification_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of every row's label.

    Args:
        model: gives logits of shape ``(rows, classes)``.
        batch: inputs and labels.

    Returns:
        Shape ``(rows,)``.
    """
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).float(), labels, reduction="none")


def _transformers_each(model: nn.Module, rows: Tensor) -> Tensor:
    return _token_losses(model(input_ids=rows[:, :-1], use_cache=False).logits, rows)


def _transformers_losses(model: nn.Module, rows: Tensor) -> Tensor:
    return _transformers_each(model, rows).mean(dim=1)


def _transformers_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return _transformers_losses(model, rows).mean()


def _token_losses(logits: Tensor, rows: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
    return losses.view(len(rows), -1)


def _transformers(chosen: TransformersConfig, *, base: Path, vocabulary: int) -> Trainable:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "model.kind transformers needs that library: pip install 'mixwell[transformers]'"
        ) from error
    path = base / Path(chosen.path).expanduser()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model.path: {path} has no config.json; give the folder of a model of transformers "
            "(nothing is downloaded)"
        )
    try:
        if chosen.pretrained:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
        else:
            description = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_config(description)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: cannot load a causal language model from {path}: {error}") from error
    model = model.float()  # weights in half precision would lose small updates
    if model.config.vocab_size < vocabulary:
        raise ValueError(
            f"the model in {path} knows {model.config.vocab_size} tokens, fewer than the tokenizer's "
            f"{vocabulary}; give its own tokenizer file as `tokenizer`"
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and chosen.context > longest:
        raise ValueError(
            f"model.context is {chosen.context}, but the model in {path} takes at most {longest}"
        )
    size = model.config.vocab_size
    return Trainable(
        model, _transformers_loss, chosen.context, size, _transformers_losses, _transformers_each
    )


def _python(chosen: PythonConfig, *, base: Path) -> Trainable:
    made: Any = entry_points.call(chosen.entry, chosen.arguments, base=base, key="model.entry")
    parts: list[Any] = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else []
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module) or not all(map(callable, parts[1:])):
        raise ValueError(
            f"model.entry: {chosen.entry} must return (model, loss) with a torch.nn.Module and a function "
            "loss(model, batch), or (model, loss, row_losses) with one that gives the loss of every row; got "
            f"{type(made).__name__}"
        )
    model, loss, *more = parts
    return Trainable(model, loss, chosen.context, chosen.vocabulary, more[0] if more else None)
