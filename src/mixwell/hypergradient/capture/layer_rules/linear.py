"""Linear layers: ``Y = X W^T + b``, so that ``G = dY^T X`` over the positions of a domain's rows, and dY for b."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import (
    LAYER_RULES,
    WEIGHT_AND_BIAS,
    LayerCall,
    LayerRule,
    OtherCall,
)
from mixwell.hypergradient.capture.layer_rules.fused import (
    TWO_ROWS,
    OpenBatch,
    autocast_inputs,
    fused_forward,
    gradient_error,
    has_plain_forward,
    plain_arithmetic,
)
from mixwell.hypergradient.capture.row_groups import RowGroups


@final
@LAYER_RULES.register(nn.Linear)
class LinearRule(LayerRule):
    """``G = dY^T X``, projected ``(dY B)^T (X A)``."""

    parameter_names = WEIGHT_AND_BIAS

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return ``X A``, shape ``(rows, length, r)``."""
        if self.weight is None:
            return None
        return accumulator.project_inputs(self.weight, accumulator.row_groups.per_row(inputs[0]))

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        self._accumulate_linear(saved, accumulator.row_groups.per_row(gradient), accumulator)

    @override
    def has_rows(self, values: Tensor, groups: RowGroups) -> bool:
        return values.dim() > 1 and groups.has_rows(values)

    @override
    def fuse(
        self, accumulator: GradientAccumulator, other_call: OtherCall
    ) -> AbstractContextManager[None] | None:
        if not has_plain_forward(self.module, nn.Linear):
            return None
        return fused_forward(self.module, self._apply_fused, accumulator, other_call)

    @override
    def fused_error(self, call: LayerCall, accumulator: GradientAccumulator) -> float:
        rows = accumulator.row_groups.per_row(call.inputs[0])[[0, -1]]
        return gradient_error(self.module, rows, self._apply_fused, accumulator.discarding(TWO_ROWS))

    def _apply_fused(self, values: Tensor, accumulator: GradientAccumulator) -> Tensor:
        values, matrix, vector = autocast_inputs(values, self.module.weight, self.module.bias)
        return _FusedLinear.apply(values, matrix, vector, (self.weight, self.bias), accumulator)  # type: ignore[no-any-return]


@final
class TransposedLinearRule(LayerRule):
    """A linear layer with a weight of shape inputs by outputs: ``G = X^T dY``, projected ``(X B)^T (dY A)``."""

    parameter_names = WEIGHT_AND_BIAS

    @classmethod
    @override
    def recognizes(cls, module: nn.Module, param_indices: Mapping[str, int]) -> bool:
        """Return whether it is the ``Conv1D`` of transformers (GPT-2)."""
        return type(module).__name__ == "Conv1D" and hasattr(module, "nf")

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return ``X B``, shape ``(rows, length, r)``."""
        if self.weight is None:
            return None
        return accumulator.project_outputs(self.weight, accumulator.row_groups.per_row(inputs[0]))

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        per_row = accumulator.row_groups.per_row(gradient)
        if self.weight is not None:
            accumulator.add_products(self.weight, saved, accumulator.project_inputs(self.weight, per_row))
        if self.bias is not None:
            accumulator.add_vectors(self.bias, per_row)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        matrix: Tensor,
        vector: Tensor | None,
        param_indices: tuple[int | None, int | None],
        accumulator: GradientAccumulator,
    ) -> Tensor:
        ctx.save_for_backward(values, matrix)
        (ctx.weight, ctx.bias), ctx.open = param_indices, OpenBatch(accumulator)
        return functional.linear(values, matrix, vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, matrix = ctx.saved_tensors
        gradient, accumulator = gradients[0], ctx.open.accumulator
        d_values = gradient @ matrix if ctx.needs_input_grad[0] else None
        d_matrix = d_vector = None
        if ctx.needs_input_grad[1]:
            if accumulator is not None and ctx.weight is not None:
                groups = accumulator.row_groups
                with plain_arithmetic(gradient):
                    pair = groups.per_row(gradient), groups.per_row(values)
                    d_matrix = accumulator.add_products_and_sum(ctx.weight, *pair)
            if d_matrix is None or torch.is_grad_enabled():  # with a graph of its own
                d_matrix = gradient.flatten(0, -2).t() @ values.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            d_vector = gradient.flatten(0, -2).sum(dim=0)
            if accumulator is not None and ctx.bias is not None:
                with plain_arithmetic(gradient):
                    accumulator.add_vectors(ctx.bias, accumulator.row_groups.per_row(gradient))
        return d_values, d_matrix, d_vector, None, None
