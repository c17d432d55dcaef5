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
    """Return the sum of the losses of every row's tokens and their number that count, both of shape ``(rows,)``.

    Args:
        model: is called with all inputs but the labels.
        kind: the ``loss_type`` of the model; causal and masked language models and classifiers are known.
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
    """Choose as transformers does: one output is regression, integer labels are classes, others several labels."""
    logits, labels = logits.float(), labels.to(logits.device)
    if logits.shape[-1] == 1:
        return (logits.squeeze(-1) - labels.view(-1)).square()
    if labels.dtype in (torch.int32, torch.int64):
        return functional.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=smoothing)
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)


def means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean loss of every row, shape ``(rows,)``; 0 where no token counts."""
    return sums / counts.clamp_min(1)


@torch.no_grad()
def check_model_loss(model: nn.Module, kind: str | None, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the mean over all tokens is not the model's loss, as where it adds another loss.

    Args:
        model: in evaluation mode, so that dropout does not differ.
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
