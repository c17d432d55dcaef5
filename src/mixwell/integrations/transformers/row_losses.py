"""The loss of every row, for the models of transformers, which give one number for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
SHIFTED = ("ForCausalLM",)
BY_TOKEN = ("ForMaskedLM", "ForTokenClassification")
BY_ROW = ("ForSequenceClassification", "ForImageClassification")
# How far the mean over rows may be from the model's own loss, which is computed from the same logits. A model that
# computes it in half precision rounds to three digits.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02


class LossParts(NamedTuple):
    """The loss of a batch by rows.

    Args:
        sums: the sum of the losses of every row's tokens, shape ``(rows,)``.
        counts: the number of every row's tokens that count, shape ``(rows,)``.
        auxiliary: what the model adds for the batch as a whole, with its coefficient; ``None`` if nothing.
    """

    sums: Tensor
    counts: Tensor
    auxiliary: Tensor | None

    def means(self) -> Tensor:
        """Return the mean loss of every row, shape ``(rows,)``; 0 where no token counts."""
        return self.sums / self.counts.clamp_min(1)


def loss_type(model: nn.Module) -> str | None:
    """Return the ``loss_type`` of a model, of the base model in one of PEFT."""
    base: Any = _base(model)
    causal = "ForCausalLM" if type(base).__name__.endswith("LMHeadModel") else None
    return getattr(base, "loss_type", None) or causal


def parts_of(
    model: nn.Module, kind: str | None, inputs: Mapping[str, Any], *, smoothing: float = 0.0
) -> LossParts:
    """Return the loss of every row.

    Args:
        model: is called with all inputs but the labels.
        kind: the ``loss_type`` of the model; causal and masked language models and classifiers are known.
    """
    _expect_known(model, kind, inputs)
    rest = {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels")}
    return _parts(model(**rest), model, kind, inputs, smoothing)


def counted_rows(model: nn.Module, kind: str | None, inputs: Any) -> Tensor | None:
    """Return whether each row has a label that counts (not -100), shape ``(rows,)``.

    Args:
        model: prompt tuning predicts the first token of a row too, from the last virtual token.

    Returns:
        ``None`` where the labels do not say, as with labels that are not integers.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    counted = _targets(inputs, kind, virtual_tokens(model)) != IGNORED
    return counted.flatten(1).any(dim=1) if counted.dim() > 1 else counted


def virtual_tokens(model: nn.Module) -> int:
    """Return the number of tokens that PEFT's prompt tuning and p-tuning put before each row; else 0."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    if config is None or not getattr(config, "is_prompt_learning", False):
        return 0
    # Prefix tuning puts them into the cache of keys and values, where they have no logits.
    return int(config.num_virtual_tokens) if config.peft_type in ("PROMPT_TUNING", "P_TUNING") else 0


@torch.no_grad()
def check_model_loss(model: nn.Module, kind: str | None, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the mean over all tokens, with the auxiliary loss, is not the model's own loss.

    Args:
        model: in evaluation mode, so that dropout does not differ.
    """
    _expect_known(model, kind, inputs)
    outputs = model(**inputs)
    sums, counts, auxiliary = _parts(outputs, model, kind, inputs, 0.0)
    if not counts.any():
        return  # the model's own loss is a mean over nothing
    found = float(sums.sum() / counts.sum() + (0.0 if auxiliary is None else auxiliary))
    loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    own = float(loss)
    tolerance = TOLERANCE if loss.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    if abs(found - own) > tolerance * max(abs(own), 1e-2):
        raise ValueError(
            f"the model's own loss is {own:.6g}, but its rows have {found:.6g} in the mean, so it is not the "
            f"plain loss of {kind}; give row_losses=f, where f(model, inputs) returns one loss for each row"
        )


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _expect_known(model: nn.Module, kind: str | None, inputs: Mapping[str, Any]) -> None:
    if kind not in (*SHIFTED, *BY_TOKEN, *BY_ROW):
        raise ValueError(
            f"the loss of {type(model).__name__} ({kind}) by rows is not known; give row_losses=f, where f(model, "
            "inputs) returns one loss for each row"
        )
    if inputs.get("labels") is None:
        raise ValueError("the batch has no labels; use a data collator that makes them")


def _targets(inputs: Mapping[str, Any], kind: str | None, virtual: int) -> Tensor:
    """Return the label that each position predicts, -100 where it predicts none."""
    labels: Tensor = inputs["labels"]
    if labels.dim() < 2 or kind in BY_ROW:
        return labels
    if inputs.get("shift_labels") is not None:
        return functional.pad(inputs["shift_labels"], (virtual, 0), value=IGNORED)
    labels = functional.pad(labels, (virtual, 0), value=IGNORED)
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if kind in SHIFTED else labels


def _parts(
    outputs: Any, model: nn.Module, kind: str | None, inputs: Mapping[str, Any], smoothing: float
) -> LossParts:
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    if not isinstance(outputs, dict) and inputs.get("labels") is not None and logits.dim() == 0:
        logits = outputs[1]  # after the loss
    auxiliary = _auxiliary(outputs, model)
    if kind in BY_ROW:
        losses = _of_rows(logits, inputs["labels"], smoothing)
        counted = counted_rows(model, kind, inputs)
        counts = torch.ones_like(losses) if counted is None or counted.dim() > 1 else counted.to(losses)
        return LossParts(losses, counts, auxiliary)
    targets = _targets(inputs, kind, virtual_tokens(_unwrapped(model))).to(logits.device)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"the model gives logits of shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(inputs['labels'].shape)}, so that the labels of rows are not known; give row_losses=f, where "
            "f(model, inputs) returns one loss for each row"
        )
    each = functional.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    counts = (targets != IGNORED).flatten(1).sum(dim=1)
    return LossParts(each.view(len(targets), -1).sum(dim=1), counts, auxiliary)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel."""
    return model if hasattr(model, "peft_config") else getattr(model, "module", model)


def _auxiliary(outputs: Any, model: nn.Module) -> Tensor | None:
    """Return the load-balancing loss of a mixture of experts, times the coefficient of its configuration."""
    found = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    if not isinstance(found, Tensor):
        return None
    base = _base(_unwrapped(model))
    config = getattr(base, "config", None)
    for place in (base, config, getattr(config, "text_config", None)):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            coefficient = getattr(place, name, None)
            if coefficient is not None:
                return float(coefficient) * found
    return None


def _of_rows(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Choose as transformers does: one output is regression, integer labels are classes, others several labels."""
    logits, labels = logits.float(), labels.to(logits.device)
    if logits.shape[-1] == 1:
        return (logits.squeeze(-1) - labels.view(-1)).square()
    if labels.dtype in (torch.int32, torch.int64):
        return functional.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=smoothing)
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
