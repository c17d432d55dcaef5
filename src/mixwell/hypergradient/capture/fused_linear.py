"""Linear layers that hand over the gradient of each domain on their way to the whole gradient."""

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
    module: nn.Module, weight: int | None, bias: int | None, sums: DenseAccumulator
) -> Generator[None]:
    """Let a linear layer compute ``G = sum_j G_j`` from the ``G_j`` of the domains, each of which is added up.

    PyTorch would compute G by one product; the products of the domains' rows take the same arithmetic together.

    Args:
        module: the layer.
        weight: the index of its weight, if it is trained.
        bias: the index of its bias, if it is trained.
        sums: where the gradients are added up.

    Yields:
        Nothing; afterwards the layer is as it was.
    """
    layer: Any = module

    def forward(input: Tensor) -> Tensor:
        sums.touched = True
        values, matrix, vector = input, layer.weight, layer.bias
        if torch.is_autocast_enabled(values.device.type):
            kind = torch.get_autocast_dtype(values.device.type)
            values, matrix = values.to(kind), matrix.to(kind)
            vector = None if vector is None else vector.to(kind)
        return _FusedLinear.apply(values, matrix, vector, (weight, bias), sums)  # type: ignore[no-any-return]

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
        places: tuple[int | None, int | None],
        sums: DenseAccumulator,
    ) -> Tensor:
        ctx.save_for_backward(values, matrix)
        (ctx.weight, ctx.bias), ctx.sums = places, sums
        return functional.linear(values, matrix, vector)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, matrix = ctx.saved_tensors
        gradient, sums = gradients[0], ctx.sums
        inner = gradient @ matrix if ctx.needs_input_grad[0] else None
        split = sums.segments.split(gradient)
        whole = own = None
        if ctx.needs_input_grad[1] and sums.paused:
            whole = gradient.flatten(0, -2).t() @ values.flatten(0, -2)
        elif ctx.needs_input_grad[1]:
            whole = sums.add_whole_products(ctx.weight, split, sums.segments.split(values))
        if ctx.needs_input_grad[2]:
            own = split.sum(dim=(0, 1))
            if not sums.paused:
                sums.add_vectors(ctx.bias, split)
        return inner, whole, own, None, None
