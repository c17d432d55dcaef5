"""Linear layers that compute the gradient of each domain on their way to the whole gradient."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mixwell.hypergradient.capture.accumulators import DenseAccumulator


@contextmanager
def fused_linear(
    module: nn.Module, weight: int | None, bias: int | None, accumulator: DenseAccumulator
) -> Generator[None]:
    """Let a linear layer compute ``G = sum_j G_j`` from the ``G_j`` of the domains, each of which is accumulated.

    PyTorch would compute G by one product; the products of the domains' rows take the same arithmetic together.
    Afterwards the layer is as it was.

    Args:
        weight: the index of its weight, if it is trained.
        bias: the index of its bias, if it is trained.
    """
    layer: Any = module

    def forward(input: Tensor) -> Tensor:
        accumulator.touched = True
        values, matrix, vector = input, layer.weight, layer.bias
        if torch.is_autocast_enabled(values.device.type):
            dtype = torch.get_autocast_dtype(values.device.type)
            values, matrix = values.to(dtype), matrix.to(dtype)
            vector = None if vector is None else vector.to(dtype)
        return _FusedLinear.apply(values, matrix, vector, (weight, bias), accumulator)  # type: ignore[no-any-return]

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        matrix: Tensor,
        vector: Tensor | None,
        param_indices: tuple[int | None, int | None],
        accumulator: DenseAccumulator,
    ) -> Tensor:
        ctx.save_for_backward(values, matrix)
        (ctx.weight, ctx.bias), ctx.accumulator = param_indices, accumulator
        return functional.linear(values, matrix, vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, matrix = ctx.saved_tensors
        gradient, accumulator = gradients[0], ctx.accumulator
        groups = accumulator.row_groups
        d_values = gradient @ matrix if ctx.needs_input_grad[0] else None
        per_row = groups.per_row(gradient)
        d_matrix = d_vector = None
        if ctx.needs_input_grad[1] and accumulator.paused:
            d_matrix = gradient.flatten(0, -2).t() @ values.flatten(0, -2)
        elif ctx.needs_input_grad[1]:
            d_matrix = accumulator.add_products_and_sum(ctx.weight, per_row, groups.per_row(values))
        if ctx.needs_input_grad[2]:
            d_vector = per_row.sum(dim=(0, 1))
            if not accumulator.paused:
                accumulator.add_vectors(ctx.bias, per_row)
        return d_values, d_matrix, d_vector, None, None
