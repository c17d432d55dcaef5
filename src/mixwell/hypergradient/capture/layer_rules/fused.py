"""Layers that compute ``G = sum_j G_j`` from the gradients ``G_j`` of the domains, each of which is accumulated.

PyTorch would compute G by one product over all rows; the products over the rows of each domain take the same
arithmetic together, so that the gradients of the domains cost no more than G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LayerCall, OtherCall
from mixwell.hypergradient.capture.row_groups import RowGroups

Apply = Callable[[Tensor, GradientAccumulator], Tensor]
"""The forward pass of a layer, whose backward pass accumulates."""
TWO_ROWS = RowGroups(np.array([0, 1]), 2)
"""Those on which a fused layer is compared with PyTorch's: one row of each of two domains."""


def has_plain_forward(layer: Any, kind: Any) -> bool:
    """Return whether a layer's forward pass is that of its type: a wrapper that was put around it must be kept."""
    return type(layer).forward is kind.forward and "forward" not in vars(layer)


@final
class OpenBatch:
    """The accumulator of a batch, as long as it is open and captured."""

    def __init__(self, accumulator: GradientAccumulator) -> None:
        self._accumulator, self._batch = accumulator, accumulator.batch

    @property
    def accumulator(self) -> GradientAccumulator | None:
        """Where gradients are added, ``None`` after the batch and while nothing is captured."""
        one = self._accumulator
        return None if one.paused or one.batch != self._batch else one


def plain_arithmetic(gradient: Tensor) -> AbstractContextManager[Any]:
    """Return a context without a graph and without autocast, for sums of gradients in their own precision."""
    kind = gradient.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not casts and not torch.is_grad_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    if casts:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


@final
class FusedForward:
    """The forward pass of a layer that accumulates in its own backward pass."""

    def __init__(
        self, layer: Any, apply: Apply, accumulator: GradientAccumulator, other_call: OtherCall
    ) -> None:
        self._layer, self._apply = layer, apply
        self._accumulator, self._other_call = accumulator, other_call

    def __call__(self, input: Tensor) -> Tensor:
        """Return the output of the layer."""
        layer = self._layer
        if not torch.is_grad_enabled() or 0 in input.shape[:1]:  # it leaves no gradient
            return type(layer).forward(layer, input)  # type: ignore[no-any-return]
        self._accumulator.touched = True
        if self._other_call(LayerCall((input,), {}, ()), None):
            output = type(layer).forward(layer, input)
            self._other_call(LayerCall((input,), {}, [output]), output)
            return output  # type: ignore[no-any-return]
        return self._apply(input, self._accumulator)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward pass of the copied layer, which is as it would be outside of the batch."""
        copied = memo[id(self._layer)]
        return MethodType(type(copied).forward, copied)


@contextmanager
def fused_forward(
    layer: Any, apply: Apply, accumulator: GradientAccumulator, other_call: OtherCall
) -> Generator[None]:
    """Let a layer accumulate in its own backward pass. Afterwards the layer is as it was."""
    layer.forward = forward = FusedForward(layer, apply, accumulator, other_call)
    try:
        yield
    finally:
        # Only what was put there; the layer had no forward pass of its own, and may have been given one meanwhile.
        if vars(layer).get("forward") is forward:
            del layer.forward


def autocast_inputs(
    values: Tensor, matrix: Tensor, vector: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the casts that autocast would make inside of a layer, here, where autograd records them."""
    kind = values.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        values, matrix = values.to(dtype), matrix.to(dtype)
        vector = None if vector is None else vector.to(dtype)
    return values, matrix, vector


def gradient_error(layer: Any, values: Tensor, apply: Apply, accumulator: GradientAccumulator) -> float:
    """Return the largest error of the fused output and gradients, relative to the layer's own, on a few rows.

    Differentiated is half the squared norm of the output, so that dY = Y.

    Args:
        values: an input of the rows of the accumulator.
        accumulator: one that keeps nothing.
    """
    tensors = [one for one in (layer.weight, layer.bias) if one is not None and one.requires_grad]
    # Kept from hooks on saved tensors: activation checkpointing counts those of the layer.
    with torch.enable_grad(), saved_tensors_hooks(lambda one: one, lambda one: one):
        values = values.detach().requires_grad_(values.is_floating_point())
        outputs = layer.forward(values), apply(values, accumulator)
        gradient, wanted = outputs[0].detach(), [values, *tensors]
        # Autocast may keep a cast of the weight, with its graph, for the layer's own call.
        found = [
            torch.autograd.grad(one, wanted, gradient.to(one.dtype), retain_graph=True) for one in outputs
        ]
    errors = [0.0]
    for own, fused in [(outputs[0], outputs[1]), *zip(*found, strict=True)]:
        size, error = float(own.detach().norm()), float((own - fused).detach().norm())
        if math.isfinite(size):  # NaN is for the check of non-finite gradients to name
            errors.append(error / max(size, 1e-30) if math.isfinite(error) else math.inf)
    return max(errors)
