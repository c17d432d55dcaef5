"""LayerNorm and RMSNorm: ``y = weight * x^ + bias`` with the normalized input x^."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, WEIGHT_AND_BIAS, LayerRule


@final
@LAYER_RULES.register(nn.LayerNorm, nn.RMSNorm)
class NormRule(LayerRule):
    """The sums of ``dY x^`` and of dY over a row's positions; both are vectors, which are not projected."""

    parameter_names = WEIGHT_AND_BIAS

    def __init__(self, module: nn.Module, param_indices: Mapping[str, int]) -> None:
        super().__init__(module, param_indices)
        norm: Any = module
        layer_norm = isinstance(module, nn.LayerNorm)
        self._normalize: Callable[..., Tensor] = functional.layer_norm if layer_norm else functional.rms_norm
        shape = norm.normalized_shape if hasattr(module, "normalized_shape") else norm.weight.shape
        self._shape = tuple(shape)
        self._epsilon: float | None = norm.eps if hasattr(module, "eps") else norm.variance_epsilon

    @classmethod
    @override
    def recognizes(cls, module: nn.Module, param_indices: Mapping[str, int]) -> bool:
        """Return whether it is an RMSNorm of transformers, which defines its own for nearly every model.

        Some multiply by ``1 + weight``, which has the same gradient.
        """
        epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
        vector = list(param_indices) == ["weight"] and getattr(module, "weight").dim() == 1  # noqa: B009 - not declared
        return type(module).__name__.endswith("RMSNorm") and epsilon and vector

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return the inputs, which PyTorch saves as well; x^ would take as much memory once more."""
        return inputs[0] if self.weight is not None else None

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        shape, per_row = self._shape, accumulator.row_groups.per_row
        if self.weight is not None:
            normal = self._normalize(saved, shape, eps=self._epsilon)
            # In place to save memory, but not where it would round the product (autocast).
            product = normal.mul_(gradient) if normal.dtype == gradient.dtype else normal * gradient
            accumulator.add_vectors(self.weight, per_row(product.flatten(-len(shape))))
        if self.bias is not None:
            accumulator.add_vectors(self.bias, per_row(gradient.flatten(-len(shape))))
