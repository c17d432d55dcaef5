"""The interface of a layer rule, and the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.utils.registry import TypeRegistry


@final
@dataclass(frozen=True)
class LayerCall:
    """A forward pass of a layer.

    Args:
        outputs: the tensors of the output that require gradients, in order; none of a call that is not made yet.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Tensor]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All arguments, those by keyword last."""
        return (*self.args, *self.kwargs.values())


OtherCall = Callable[[LayerCall, Any], bool]
"""Takes a call and its output, and returns whether it has no rows; before the call the output is ``None``."""


class LayerRule(ABC):
    """A layer with parameters whose gradients can be separated by rows.

    Args:
        param_indices: the index among all parameters, by the name in the layer; only of trained parameters.
    """

    covers_submodules: bool = False
    """Whether the rule is also that of the parameters of the layer's submodules, which are not called."""
    parameter_names: frozenset[str] | None = None
    """The parameters that the rule knows, ``None`` for any. A layer that has others or computes these, such as a
    pruned or parametrized one, is not given to the rule."""

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

    def save_call(self, call: LayerCall, accumulator: GradientAccumulator) -> Any:
        """Return what :meth:`accumulate_call` needs; by default the result of :meth:`save_inputs`.

        Raises:
            ValueError: the rows of the batch cannot be found.
        """
        return self.save_inputs(call.inputs, accumulator)

    def accumulate_call(
        self, saved: Any, gradients: Sequence[Tensor | None], accumulator: GradientAccumulator
    ) -> None:
        """Add the gradients of the layer's parameters.

        Args:
            gradients: of the loss by each of the call's outputs, ``None`` for those that it does not depend on.
        """
        if gradients[0] is not None:
            self.accumulate(saved, gradients[0], accumulator)

    def row_dims(self, count: int) -> list[int]:
        """Return the dimension of each of the outputs in which the rows are."""
        return [0] * count

    def has_rows(self, values: Tensor, groups: RowGroups) -> bool:
        """Return whether an input has the rows of the batch."""
        return groups.has_rows(values)

    def fuse(
        self, accumulator: GradientAccumulator, other_call: OtherCall
    ) -> AbstractContextManager[None] | None:
        """Return a context in which the layer accumulates by itself, without hooks; ``None`` where it cannot."""
        return None

    def fused_error(self, call: LayerCall, accumulator: GradientAccumulator) -> float:
        """Return the relative error of :meth:`fuse` against the layer itself, on two of the rows of a call."""
        return 0.0

    def _accumulate_linear(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Add ``(dY B)^T (X A)`` to the weight and dY to the bias; dY has shape ``(rows, length, outputs)``."""
        if self.weight is not None:
            accumulator.add_products(self.weight, accumulator.project_outputs(self.weight, gradient), saved)
        if self.bias is not None:
            accumulator.add_vectors(self.bias, gradient)


WEIGHT_AND_BIAS = frozenset({"weight", "bias"})

LAYER_RULES = TypeRegistry[type[LayerRule]]("layer rule", package="mixwell.hypergradient.capture.layer_rules")
"""The rule of every supported type of layer."""
