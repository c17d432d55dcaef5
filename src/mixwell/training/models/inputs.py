"""What the built-in models take: batches of other types and shapes, and numbers out of range, are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mixwell.data.datasets import IndexedDataset, TensorRows
from mixwell.typing import LossFn

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def token_rows(batch: Any, *, context: int) -> Tensor:
    """Return tokens as int64; refuse what is not a batch of them.

    Raises:
        ValueError: it is not a tensor of whole numbers, of shape ``(rows, length + 1)``.
    """
    if (
        not isinstance(batch, Tensor)
        or batch.dim() != 2
        or batch.dtype not in WHOLE
        or not 2 <= batch.shape[1] <= context + 1
    ):
        raise ValueError(
            "a language model takes rows of token numbers, an integer tensor of shape (rows, length + 1) with at "
            f"most model.context + 1 = {context + 1} numbers in a row; got {_shown(batch)}"
        )
    return batch.long()


def labeled_images(batch: Any) -> tuple[Tensor, Tensor]:
    """Return images, and their classes as int64; refuse what is not a batch of them.

    Raises:
        ValueError: it is not ``(images, classes)``, float32 ``(rows, 1, 28, 28)`` and integers ``(rows,)``.
    """
    parts = cast("tuple[Any, ...]", batch) if isinstance(batch, tuple | list) else ()
    if len(parts) == 2 and all(isinstance(part, Tensor) for part in parts):
        images, classes = cast("tuple[Tensor, Tensor]", (parts[0], parts[1]))
        # The network pools twice, so that a few more pixels make no difference.
        fits = images.dim() == 4 and (images.shape[1], images.shape[2] // 4, images.shape[3] // 4) == (
            1,
            7,
            7,
        )
        labeled = classes.shape == images.shape[:1] and classes.dtype in WHOLE
        if fits and labeled and images.dtype == torch.float32:
            return images, classes.long()
    raise ValueError(
        "the model cnn takes images and their classes: a float32 tensor of shape (rows, 1, 28, 28) and an integer "
        f"tensor of shape (rows,); got {_shown(batch)}"
    )


def check_rows(
    rows: IndexedDataset, checked: Callable[[Any], Any], *, column: int, limit: int, what: str
) -> None:
    """Check some rows, and all numbers of a column, where rows are tensors; others are checked as they train.

    Args:
        checked: raises ``ValueError`` for a wrong batch.
        column: of the numbers; each must be at least 0 and below ``limit``.
        what: these numbers are, for the message.
    """
    if not isinstance(rows, TensorRows):
        return  # to read rows of a dataset may draw random numbers
    checked(rows.batch(np.arange(min(len(rows), 2))))
    low, high = (int(one) for one in rows.tensors[column].aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} must be from 0 to {limit - 1}, got {low} to {high}")


def with_checks(loss: LossFn, checked: Callable[[Any], Any], what: str) -> LossFn:
    """Return a loss that checks its batch, and explains a number that is out of range."""

    def checked_loss(model: nn.Module, batch: Any) -> Tensor:
        with _explained(what):
            return loss(model, checked(batch))

    return checked_loss


def user_loss(loss: LossFn, *, each: bool, name: str) -> LossFn:
    """Return a loss of the user whose result is checked.

    Args:
        each: whether it is that of every row, or their mean.
        name: of the function, for messages.

    Raises:
        ValueError: it does not take a model and a batch.
    """
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{name}(model, batch) cannot be called with a model and a batch: {error}"
        ) from error
    except ValueError:  # a built-in function may not say what it takes
        pass
    expected = "a tensor of shape (rows,)" if each else "a tensor with one number, the mean over the batch"

    def checked_loss(model: nn.Module, batch: Any) -> Tensor:
        found: Any = loss(model, batch)
        if (
            not isinstance(found, Tensor)
            or not found.is_floating_point()
            or (not each and found.numel() != 1)
        ):
            raise ValueError(f"{name}(model, batch) must return {expected}; got {_shown(found)}")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise ValueError(
                f"{name}(model, batch) returned a tensor without a graph: compute it with the model's parameters, "
                "without detach() or torch.no_grad()"
            )
        return found

    return checked_loss


@contextmanager
def _explained(what: str) -> Generator[None]:
    try:
        yield
    except IndexError as error:  # of an embedding, or of the cross-entropy
        raise ValueError(f"{what} out of the model's range ({str(error).splitlines()[0]})") from error


def _shown(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} of shape {tuple(batch.shape)}"
    if isinstance(batch, tuple | list):
        parts = list(cast("tuple[Any, ...]", batch))[:4]
        return f"{type(batch).__name__} of {', '.join(map(_shown, parts)) or 'nothing'}"
    return type(batch).__name__
