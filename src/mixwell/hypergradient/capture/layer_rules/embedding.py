"""Embeddings: ``Y = X W`` with one-hot X, so that the gradient of row v is the sum of dY where v was looked up."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, WEIGHT_AND_BIAS, LayerRule


@final
@LAYER_RULES.register(nn.Embedding)
class EmbeddingRule(LayerRule):
    """``G = X^T dY``, projected ``(X B)^T (dY A)``, where ``X B`` are the rows of B that were looked up."""

    parameter_names = WEIGHT_AND_BIAS

    @classmethod
    @override
    def supports(cls, module: nn.Module) -> bool:
        table: Any = module
        return table.max_norm is None and not table.scale_grad_by_freq

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return the indices, -1 for those that are not trained, shape ``(rows, length)``."""
        looked_up = accumulator.row_groups.per_row(inputs[0].unsqueeze(-1)).squeeze(-1)
        padding = self.module.padding_idx
        return looked_up if padding is None else looked_up.masked_fill(looked_up == padding, -1)

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        if self.weight is None:
            return
        groups, projection = accumulator.row_groups, accumulator.projection(self.weight)
        gradient = groups.per_row(gradient)
        if projection is not None:
            table = projection.matrix("outputs", projection.dtype)
            if table is None:
                table = torch.eye(projection.outputs, dtype=projection.dtype, device=gradient.device)
            chosen = functional.embedding(saved.clamp_min(0), table)
            chosen = chosen.masked_fill((saved < 0).unsqueeze(-1), 0.0)
            accumulator.add_products(self.weight, chosen, projection.project_inputs(gradient))
            return
        saved, gradient = groups.sort_rows(saved), groups.sort_rows(gradient)
        for domain, begin, end in groups.slices:
            rows, local = saved[begin:end].flatten(), gradient[begin:end].flatten(0, 1)
            local = local.masked_fill((rows < 0).unsqueeze(-1), 0.0)
            table = torch.zeros_like(self.module.weight, dtype=local.dtype)
            accumulator.add_gradient(self.weight, domain, table.index_add_(0, rows.clamp_min(0), local))
