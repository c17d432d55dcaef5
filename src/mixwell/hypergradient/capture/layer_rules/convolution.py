"""Convolutions: linear layers on patches of their input, ``G = dY^T X`` with a row of X for each patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import grad as derivatives
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
from mixwell.hypergradient.capture.row_groups import FIRST_DIMENSION, RowGroups

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
INPUT_GRADIENTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: derivatives.conv1d_input,
    nn.Conv2d: derivatives.conv2d_input,
    nn.Conv3d: derivatives.conv3d_input,
}
WEIGHT_GRADIENTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: derivatives.conv1d_weight,
    nn.Conv2d: derivatives.conv2d_weight,
    nn.Conv3d: derivatives.conv3d_weight,
}


@final
@LAYER_RULES.register(*CONVOLUTIONS)
class ConvolutionRule(LayerRule):
    """``G_j`` of the domains in place of G: a product has so many positions that it pays by itself.

    Where it does not, ``(dY B)^T (X A)``; ``X A`` is a convolution with the r columns of A as filters, so X is
    never formed.
    """

    parameter_names = WEIGHT_AND_BIAS

    @classmethod
    @override
    def supports(cls, module: nn.Module) -> bool:
        convolution: Any = module
        # A subclass may convolve in another way.
        return (
            type(module) in CONVOLUTIONS and convolution.groups == 1 and convolution.padding_mode == "zeros"
        )

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return ``X A``, shape ``(rows, positions, r)``, from shape ``(rows, channels, ...)``."""
        if self.weight is None:
            return None
        images, module = inputs[0], self.module
        if images.shape[0] != len(accumulator.row_groups):
            raise ValueError(FIRST_DIMENSION)
        projection = accumulator.projection(self.weight)
        matrix = None if projection is None else projection.matrix("inputs", images.dtype)
        filters = _filters(matrix, module.weight, images.dtype)
        convolve = CONVOLUTIONS[type(module)]
        return _positions_first(
            convolve(images, filters, stride=module.stride, padding=module.padding, dilation=module.dilation)
        )

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        self._accumulate_linear(saved, _positions_first(gradient), accumulator)

    @override
    def fuse(
        self, accumulator: GradientAccumulator, other_call: OtherCall
    ) -> AbstractContextManager[None] | None:
        if not self._fuses:
            return None
        return fused_forward(self.module, self._apply_fused, accumulator, other_call)

    @override
    def fused_error(self, call: LayerCall, accumulator: GradientAccumulator) -> float:
        rows = call.inputs[0][[0, -1]]
        return gradient_error(self.module, rows, self._apply_fused, accumulator.discarding(TWO_ROWS))

    @override
    def has_rows(self, values: Tensor, groups: RowGroups) -> bool:
        return values.dim() == self.module.weight.dim() and values.shape[0] == len(groups)

    @property
    def _fuses(self) -> bool:
        # A padding in words may add more on one side.
        return has_plain_forward(self.module, type(self.module)) and not isinstance(self.module.padding, str)

    def _apply_fused(self, values: Tensor, accumulator: GradientAccumulator) -> Tensor:
        module = self.module
        values, matrix, vector = autocast_inputs(values, module.weight, module.bias)
        return _FusedConvolution.apply(values, matrix, vector, self, accumulator)  # type: ignore[no-any-return]


class _FusedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        matrix: Tensor,
        vector: Tensor | None,
        rule: ConvolutionRule,
        accumulator: GradientAccumulator,
    ) -> Tensor:
        ctx.save_for_backward(values, matrix)
        ctx.rule, ctx.open = rule, OpenBatch(accumulator)
        return CONVOLUTIONS[type(rule.module)](values, matrix, vector, *_settings(rule.module))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, matrix = ctx.saved_tensors
        gradient, accumulator, rule = gradients[0], ctx.open.accumulator, ctx.rule
        kind, settings = type(rule.module), _settings(rule.module)
        d_values = d_matrix = d_vector = None
        if ctx.needs_input_grad[0]:
            d_values = INPUT_GRADIENTS[kind](values.shape, matrix, gradient, *settings)
        if ctx.needs_input_grad[1]:
            if accumulator is not None and rule.weight is not None:
                with plain_arithmetic(gradient):
                    d_matrix = _add_products(rule, accumulator, values, gradient, matrix)
            if d_matrix is None or torch.is_grad_enabled():  # with a graph of its own
                d_matrix = WEIGHT_GRADIENTS[kind](values, matrix.shape, gradient, *settings)
        if ctx.needs_input_grad[2]:
            sums = gradient.flatten(2).sum(2)
            d_vector = sums.sum(0)
            if accumulator is not None and rule.bias is not None:
                with plain_arithmetic(gradient):
                    accumulator.add_vectors(rule.bias, sums.unsqueeze(1))
        return d_values, d_matrix, d_vector, None, None


def _settings(module: Any) -> tuple[Any, ...]:
    """Return stride, padding, dilation and groups, as the functions of convolutions take them."""
    return module.stride, module.padding, module.dilation, module.groups


def _add_products(
    rule: ConvolutionRule, accumulator: GradientAccumulator, values: Tensor, gradient: Tensor, matrix: Tensor
) -> Tensor:
    """Add the gradient of the weight of every domain, and return the sum."""
    groups, product = accumulator.row_groups, WEIGHT_GRADIENTS[type(rule.module)]
    total: Tensor | None = None
    assert rule.weight is not None
    for domain, begin, end in groups.slices:
        inputs, outputs = (_take(groups, one, begin, end) for one in (values, gradient))
        own = product(inputs, matrix.shape, outputs, *_settings(rule.module))
        accumulator.add_gradient(rule.weight, domain, own)
        # In half precision the sum of rounded parts would lose digits.
        wide = torch.promote_types(own.dtype, torch.float32)
        total = own.to(wide) if total is None else total.add_(own)
    assert total is not None
    return total.to(matrix.dtype)


def _take(groups: RowGroups, values: Tensor, begin: int, end: int) -> Tensor:
    """Return some of the sorted rows, in the memory format of the values."""
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return groups.take(values.permute(0, 2, 3, 1), begin, end).permute(0, 3, 1, 2)
    return groups.take(values, begin, end)


def _filters(matrix: Tensor | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the columns of a matrix, or of the identity, as filters."""
    side = torch.eye(weight[0].numel(), dtype=dtype, device=weight.device) if matrix is None else matrix
    filters = side.t().reshape(-1, *weight.shape[1:])
    # In the memory format of the layer's own weight, so that the same kernels run without conversions.
    channels_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return filters.contiguous(memory_format=torch.channels_last) if channels_last else filters


def _positions_first(values: Tensor) -> Tensor:
    """Reshape ``(rows, channels, ...)`` to ``(rows, positions, channels)``."""
    return values.movedim(1, -1).reshape(len(values), -1, values.shape[1])
