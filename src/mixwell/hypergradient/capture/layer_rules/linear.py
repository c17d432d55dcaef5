"""Linear layers: ``Y = X W^T + b``, so that ``G = dY^T X`` over the positions of a domain's rows, and dY for b."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import DenseAccumulator, GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import (
    LAYER_RULES,
    WEIGHT_AND_BIAS,
    LayerCall,
    LayerRule,
    OtherCall,
)

# A block of a gradient of this size stays in a core's cache while it is added to the trace and to the sum.
BLOCK = 1 << 17


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
    def fuse(
        self, accumulator: GradientAccumulator, other_call: OtherCall
    ) -> AbstractContextManager[None] | None:
        # A wrapper that was put around the layer's forward pass must keep it.
        plain = type(self.module).forward is nn.Linear.forward and "forward" not in vars(self.module)
        if not (plain and isinstance(accumulator, DenseAccumulator)):
            return None
        return _fused(self.module, self.weight, self.bias, accumulator, other_call)

    @override
    def fused_twin(
        self, call: LayerCall, accumulator: GradientAccumulator
    ) -> Callable[[Tensor], float] | None:
        """Return the error of the fused gradients, relative to PyTorch's own, as a function of dY."""
        if not isinstance(accumulator, DenseAccumulator):
            return None
        values = (*call.args, *call.kwargs.values())[0].detach()
        tensors = [
            one for one in (self.module.weight, self.module.bias) if one is not None and one.requires_grad
        ]
        discarding = accumulator.discarding()
        # Kept from hooks on saved tensors: activation checkpointing counts those of the layer.
        keep = saved_tensors_hooks(lambda one: one, lambda one: one)
        with torch.enable_grad(), keep:
            values.requires_grad_(values.is_floating_point())
            own = self.module.forward(values)
            fused = _apply_fused(values, self.module, self.weight, self.bias, discarding)

        def error(gradient: Tensor) -> float:
            wanted = [values, *tensors]
            found = [torch.autograd.grad(one, wanted, gradient.to(one.dtype)) for one in (own, fused)]
            pairs = [(own.detach(), fused.detach()), *zip(*found, strict=True)]
            # A sum of dY that is zero but for rounding, as for the bias of keys, is compared with dY.
            least = max(0.01 * float(gradient.norm()), 1e-30)
            errors = [
                float((a - b).norm()) / max(float(a.norm()), least if a.dim() == 1 else 1e-30)
                for a, b in pairs
            ]
            # NaN is for the check of non-finite gradients to name.
            return max((one for one in errors if math.isfinite(one)), default=0.0)

        return error


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


@contextmanager
def _fused(
    layer: Any, weight: int | None, bias: int | None, accumulator: DenseAccumulator, other_call: OtherCall
) -> Generator[None]:
    """Let a layer compute ``G = sum_j G_j`` from the ``G_j`` of the domains, each of which is accumulated.

    PyTorch would compute G by one product; the products of the domains' rows take the same arithmetic together.
    Afterwards the layer is as it was.
    """

    def forward(input: Tensor) -> Tensor:
        accumulator.touched = True
        if other_call(LayerCall((input,), {}, ()), None):
            output = functional.linear(input, layer.weight, layer.bias)
            other_call(LayerCall((input,), {}, [output]), output)
            return output
        return _apply_fused(input, layer, weight, bias, accumulator)

    layer.forward = forward
    try:
        yield
    finally:
        # Only what was put there; the layer had no forward pass of its own, and may have been given one meanwhile.
        if vars(layer).get("forward") is forward:
            del layer.forward


def _apply_fused(
    values: Tensor, layer: Any, weight: int | None, bias: int | None, accumulator: DenseAccumulator
) -> Tensor:
    matrix, vector = layer.weight, layer.bias
    # The casts that autocast would make inside of the function, here, where autograd records them.
    if torch.is_autocast_enabled(values.device.type):
        dtype = torch.get_autocast_dtype(values.device.type)
        values, matrix = values.to(dtype), matrix.to(dtype)
        vector = None if vector is None else vector.to(dtype)
    return _FusedLinear.apply(values, matrix, vector, (weight, bias), accumulator)  # type: ignore[no-any-return]


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
        if ctx.needs_input_grad[1] and (accumulator.paused or ctx.weight is None):
            d_matrix = gradient.flatten(0, -2).t() @ values.flatten(0, -2)
        elif ctx.needs_input_grad[1]:
            d_matrix = _add_products_and_sum(ctx.weight, per_row, groups.per_row(values), accumulator)
        if ctx.needs_input_grad[2]:
            d_vector = per_row.sum(dim=(0, 1))
            if not accumulator.paused and ctx.bias is not None:
                accumulator.add_vectors(ctx.bias, per_row)
        return d_values, d_matrix, d_vector, None, None


def _add_products_and_sum(
    index: int, outputs: Tensor, inputs: Tensor, accumulator: DenseAccumulator
) -> Tensor:
    """Add ``dY^T X`` over the rows of every domain, and return the sum over all domains, shape ``(a, b)``.

    Args:
        outputs: dY, shape ``(rows, length, a)``.
        inputs: X, shape ``(rows, length, b)``.
    """
    groups = accumulator.row_groups
    outputs, inputs = (groups.sort_rows(one).flatten(0, 1) for one in (outputs, inputs))
    length = len(outputs) // len(groups)
    count, width = outputs.shape[1], inputs.shape[1]
    whole = outputs.new_empty(count, width)
    # By blocks, so that a product is still in the cache when it is added to the sum and the trace. On a GPU the
    # launches of the kernels would cost more than that saves.
    in_blocks = not outputs.is_cuda and accumulator.blockwise(index)
    size = max(BLOCK // max(width, 1), 1) if in_blocks else count
    scratch = outputs.new_empty(min(size, count), width) if len(groups.slices) > 1 else whole
    for start in range(0, count, size):
        block = slice(start, min(start + size, count))
        total = whole[block]
        for position, (domain, begin, end) in enumerate(groups.slices):
            # The product of the first domain is written where the sum is wanted.
            product = scratch[: len(total)] if position else total
            rows = slice(begin * length, end * length)
            torch.mm(outputs[rows, block].t(), inputs[rows], out=product)
            if position:
                total.add_(product)
            accumulator.add_gradient(index, domain, product, block)
    return whole
