"""The loss of every row, for the models of transformers, which give one number for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
SHIFTED = ("ForCausalLM",)
BY_TOKEN = ("ForMaskedLM", "ForTokenClassification")
BY_ROW = ("ForSequenceClassification", "ForImageClassification")
# How far the mean over rows may be from the model's own loss; bfloat16 stays well below.
TOLERANCE = 0.02


def parts_of(
    model: nn.Module, kind: str | None, inputs: Mapping[str, Any], *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of every row's tokens, and the number of tokens that count.

    Args:
        model: is called with all inputs but the labels.
        kind: the ``loss_type`` of the model; causal and masked language models and classifiers are known.
        inputs: of the model, with ``labels``.

    Returns:
        Both of shape ``(rows,)``.

    Raises:
        ValueError: the model's loss is not known, or there are no labels.
    """
    if kind not in (*SHIFTED, *BY_TOKEN, *BY_ROW):
        raise ValueError(
            f"the loss of {type(model).__name__} ({kind}) by rows is not known; give row_losses=f, where f(model, "
            "inputs) returns one loss for each row"
        )
    if inputs.get("labels") is None:
        raise ValueError("the batch has no labels; use a data collator that makes them")
    rest = {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels")}
    outputs = model(**rest)
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    labels: Tensor = inputs["labels"]
    if kind in BY_ROW:
        losses = _of_rows(logits, labels, smoothing)
        return losses, torch.ones_like(losses)
    if inputs.get("shift_labels") is not None:
        labels = inputs["shift_labels"]
    elif kind in SHIFTED:
        labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    each = functional.cross_entropy(
        logits.float().flatten(0, -2),
        labels.to(logits.device).flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    counted = (labels.to(logits.device) != IGNORED).flatten(1).sum(dim=1)
    return each.view(len(labels), -1).sum(dim=1), counted


def _of_rows(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """As transformers chooses: one number is regression, whole numbers are classes, others are several labels."""
    logits, labels = logits.float(), labels.to(logits.device)
    if logits.shape[-1] == 1:
        return (logits.squeeze(-1) - labels.view(-1)).square()
    if labels.dtype in (torch.int32, torch.int64):
        return functional.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=smoothing)
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)


def means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean loss of every row; 0 where no token counts.

    Args:
        sums: of the tokens' losses, shape ``(rows,)``.
        counts: of the tokens, shape ``(rows,)``.

    Returns:
        Shape ``(rows,)``.
    """
    return sums / counts.clamp_min(1)


@torch.no_grad()
def check(model: nn.Module, kind: str | None, inputs: Mapping[str, Any]) -> None:
    """Compare the mean over all tokens with the loss that the model itself gives.

    Args:
        model: in evaluation mode, so that both see the same.
        kind: its ``loss_type``.

    Raises:
        ValueError: they differ, as for a model that adds a loss of its own.
    """
    sums, counts = parts_of(model, kind, inputs)
    found = float(sums.sum() / counts.sum().clamp_min(1))
    outputs = model(**inputs)
    own = float(outputs["loss"] if isinstance(outputs, dict) else outputs[0])
    if abs(found - own) > TOLERANCE * max(abs(own), 1e-3):
        raise ValueError(
            f"the model's own loss is {own:.4f}, but its rows have {found:.4f} in the mean, so it is not the "
            f"plain loss of {kind}; give row_losses=f, where f(model, inputs) returns one loss for each row"
        )
