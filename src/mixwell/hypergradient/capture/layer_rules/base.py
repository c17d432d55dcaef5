"""The interface of a layer rule, and the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.utils.registry import TypeRegistry


class LayerRule(ABC):
    """A layer with parameters whose gradients can be separated by rows.

    Args:
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

    @classmethod
    def recognizes(cls, module: nn.Module, param_indices: Mapping[str, int]) -> bool:
        """Return whether a module of a type that is not registered is such a layer, by its name and attributes."""
        return False

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


LAYER_RULES = TypeRegistry[type[LayerRule]]("layer rule", package="mixwell.hypergradient.capture.layer_rules")
"""The rule of every supported type of layer."""
