"""Convolutions: linear layers on patches of their input, ``G = dY^T X`` with a row of X for each patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, WEIGHT_AND_BIAS, LayerRule
from mixwell.hypergradient.capture.row_groups import FIRST_DIMENSION

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


@final
@LAYER_RULES.register(*CONVOLUTIONS)
class ConvolutionRule(LayerRule):
    """``(dY B)^T (X A)``; ``X A`` is a convolution with the r columns of A as filters, so X is never formed."""

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
