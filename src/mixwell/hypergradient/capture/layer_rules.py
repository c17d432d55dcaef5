"""How the gradients of a layer's parameters arise, row by row: one rule per type of layer.

A rule saves part of the inputs in the forward pass, and accumulates the gradient of each domain in the backward
pass, when the gradient of the outputs is there. The saved tensors are small (r numbers per position instead of a
layer's width) or refer to tensors that PyTorch saves for its own backward pass.

Add a type of layer with ``@LAYER_RULES.registering(MyLayer)`` on a subclass of :class:`LayerRule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import DenseAccumulator, GradientAccumulator
from mixwell.hypergradient.capture.fused_linear import fused_linear
from mixwell.utils.registry import TypeRegistry


class LayerRule(ABC):
    """A layer with parameters whose gradients can be separated by rows.

    Args:
        module: the layer.
        param_indices: the index among all parameters, by the name in the layer; only of trained parameters.
    """

    def __init__(self, module: nn.Module, param_indices: Mapping[str, int]) -> None:
        self.module: Any = module
        self.weight = param_indices.get("weight")
        self.bias = param_indices.get("bias")
        self.param_indices = param_indices

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Return whether the rule holds for a module of its type."""
        return True

    @abstractmethod
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return the part of the forward pass's inputs that :meth:`accumulate` needs.

        Raises:
            ValueError: the rows of the batch cannot be found in the inputs.
        """

    @abstractmethod
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Add the gradients of the layer's parameters.

        Args:
            saved: the result of :meth:`save_inputs`.
            gradient: dY, of the loss by the layer's output.
        """

    def fuse(self, accumulator: GradientAccumulator) -> AbstractContextManager[None] | None:
        """Return a context in which the layer accumulates by itself, without hooks; ``None`` where it cannot."""
        return None

    def _accumulate_linear(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Add ``(dY B)^T (X A)`` to the weight and dY to the bias; dY has shape ``(rows, length, outputs)``."""
        if self.weight is not None:
            accumulator.add_products(self.weight, accumulator.project_outputs(self.weight, gradient), saved)
        if self.bias is not None:
            accumulator.add_vectors(self.bias, gradient)


LAYER_RULES = TypeRegistry[type[LayerRule]]("layer rule")
"""The rule of every supported type of layer."""


@final
@LAYER_RULES.registering(nn.Linear)
class LinearRule(LayerRule):
    """``G = dY^T X``, and dY itself for the bias."""

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
    def fuse(self, accumulator: GradientAccumulator) -> AbstractContextManager[None] | None:
        # A subclass or a wrapper with a forward pass of its own must keep it.
        plain = type(self.module).forward is nn.Linear.forward and "forward" not in vars(self.module)
        if not (plain and isinstance(accumulator, DenseAccumulator)):
            return None
        return fused_linear(self.module, self.weight, self.bias, accumulator)


@final
class TransposedLinearRule(LayerRule):
    """A linear layer with a weight of shape inputs by outputs, such as the ``Conv1D`` of transformers."""

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return ``X B``, shape ``(rows, length, r)``."""
        if self.weight is None:
            return None
        return accumulator.project_outputs(self.weight, accumulator.row_groups.per_row(inputs[0]))

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Add ``(X B)^T (dY A)``."""
        per_row = accumulator.row_groups.per_row(gradient)
        if self.weight is not None:
            accumulator.add_products(self.weight, saved, accumulator.project_inputs(self.weight, per_row))
        if self.bias is not None:
            accumulator.add_vectors(self.bias, per_row)


@final
@LAYER_RULES.registering(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table from which rows are looked up."""

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
        if self.weight is not None:
            accumulator.add_lookups(self.weight, saved, accumulator.row_groups.per_row(gradient))


@final
@LAYER_RULES.registering(nn.LayerNorm, nn.RMSNorm)
class NormRule(LayerRule):
    """``y = weight * x^ + bias`` with normalized x^ (LayerNorm, RMSNorm): exact gradients."""

    def __init__(self, module: nn.Module, param_indices: Mapping[str, int]) -> None:
        super().__init__(module, param_indices)
        norm: Any = module
        layer_norm = isinstance(module, nn.LayerNorm)
        self._normalize: Callable[..., Tensor] = functional.layer_norm if layer_norm else functional.rms_norm
        shape = norm.normalized_shape if hasattr(module, "normalized_shape") else norm.weight.shape
        self._shape = tuple(shape)
        self._epsilon: float | None = norm.eps if hasattr(module, "eps") else norm.variance_epsilon

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        """Return the inputs, which PyTorch saves as well."""
        return inputs[0] if self.weight is not None else None

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Add the sums of ``dY x^`` and of dY over a row's positions."""
        shape, per_row = self._shape, accumulator.row_groups.per_row
        if self.weight is not None:
            normal = self._normalize(saved, shape, eps=self._epsilon)
            product = normal.mul_(gradient) if normal.dtype == gradient.dtype else normal * gradient
            accumulator.add_vectors(self.weight, per_row(product.flatten(-len(shape))))
        if self.bias is not None:
            accumulator.add_vectors(self.bias, per_row(gradient.flatten(-len(shape))))


CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


@final
@LAYER_RULES.registering(*CONVOLUTIONS)
class ConvolutionRule(LayerRule):
    """A linear layer on patches of its input; ``X A`` is a convolution with the r columns of A as filters."""

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
        images, module, rows = inputs[0], self.module, len(accumulator.row_groups)
        if images.shape[0] != rows:
            raise ValueError(f"it sees {images.shape[0]} images, not the {rows} of the batch")
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
    """The columns of a matrix, or of the identity, as filters."""
    side = torch.eye(weight[0].numel(), dtype=dtype, device=weight.device) if matrix is None else matrix
    filters = side.t().reshape(-1, *weight.shape[1:])
    channels_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return filters.contiguous(memory_format=torch.channels_last) if channels_last else filters


def _positions_first(values: Tensor) -> Tensor:
    """``(rows, channels, ...)`` as ``(rows, positions, channels)``."""
    return values.movedim(1, -1).reshape(len(values), -1, values.shape[1])


@final
class RecomputeRule(LayerRule):
    """A layer of another type, run again on the rows of each domain. It must treat rows independently."""

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        if isinstance(inputs[0], Tensor):
            # Refuses a first dimension that is not the rows'.
            accumulator.row_groups.per_row(inputs[0].unsqueeze(-1))
        return inputs

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Run a forward and a backward pass of this layer for each domain."""
        groups = accumulator.row_groups
        count = len(groups)

        def has_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] % count == 0

        def sort_rows(value: Any) -> Any:
            """``(rows, positions, ...)`` in the order of the domains."""
            return groups.sort_rows(value.detach().unflatten(0, (count, -1))) if has_rows(value) else value

        inputs, outputs = [(sort_rows(value), has_rows(value)) for value in saved], sort_rows(gradient)
        parameters = [getattr(self.module, name) for name in self.param_indices]
        for domain, begin, end in groups.slices:
            local = [value[begin:end].flatten(0, 1) if of_rows else value for value, of_rows in inputs]
            with torch.enable_grad():
                again = self.module(*local)
            found = torch.autograd.grad(
                again, parameters, outputs[begin:end].flatten(0, 1).to(again.dtype), allow_unused=True
            )
            gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
            for index, one in zip(self.param_indices.values(), gradients, strict=True):
                if one is not None and index not in accumulator.ignored:
                    accumulator.add_gradient(index, domain, one)


def _rule_by_name(module: nn.Module, param_indices: Mapping[str, int]) -> type[LayerRule] | None:
    """Recognize layers of transformers, which defines an RMSNorm of its own for nearly every model.

    Some multiply by ``1 + weight``, which has the same gradient. A layer that only shares the name is found in the
    first step of a round, where the sums are compared with the gradient.
    """
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        return TransposedLinearRule
    epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    vector = list(param_indices) == ["weight"] and getattr(module, "weight").dim() == 1  # noqa: B009 - not declared
    return NormRule if name.endswith("RMSNorm") and epsilon and vector else None


def rule_for(module: nn.Module, param_indices: Mapping[str, int]) -> LayerRule | None:
    """Return the rule of a module with trained parameters, ``None`` where its rows cannot be separated."""
    rule = LAYER_RULES.find(module) or _rule_by_name(module, param_indices)
    if rule is not None and rule.supports(module):
        return rule(module, param_indices)
    mixes_rows = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
    return (
        None if mixes_rows or any(True for _ in module.children()) else RecomputeRule(module, param_indices)
    )
