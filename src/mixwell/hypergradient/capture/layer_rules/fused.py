"""Layers that compute ``G = sum_j G_j`` from the gradients ``G_j`` of the domains, each of which is accumulated.

PyTorch would compute G by one product over all rows; the products over the rows of each domain take the same
arithmetic together, so that the gradients of the domains cost no more than G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LayerCall, OtherCall

Apply = Callable[[Tensor, GradientAccumulator], Tensor]
"""The forward pass of a layer, whose backward pass accumulates."""


def has_plain_forward(layer: Any, kind: Any) -> bool:
    """Return whether a layer's forward pass is that of its type: a wrapper that was put around it must be kept."""
    return type(layer).forward is kind.forward and "forward" not in vars(layer)


@contextmanager
def fused_forward(
    layer: Any, apply: Apply, accumulator: GradientAccumulator, other_call: OtherCall
) -> Generator[None]:
    """Let a layer accumulate in its own backward pass. Afterwards the layer is as it was."""

    def forward(input: Tensor) -> Tensor:
        accumulator.touched = True
        if other_call(LayerCall((input,), {}, ()), None):
            output = type(layer).forward(layer, input)
            other_call(LayerCall((input,), {}, [output]), output)
            return output
        return apply(input, accumulator)

    layer.forward = forward
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


def gradient_error(
    layer: Any, call: LayerCall, apply: Apply, discarding: GradientAccumulator
) -> Callable[[Tensor], float]:
    """Return the error of the fused gradients, relative to PyTorch's own, as a function of dY.

    Args:
        discarding: an accumulator for the same rows that keeps nothing.
    """
    values = (*call.args, *call.kwargs.values())[0].detach()
    tensors = [one for one in (layer.weight, layer.bias) if one is not None and one.requires_grad]
    # Kept from hooks on saved tensors: activation checkpointing counts those of the layer.
    keep = saved_tensors_hooks(lambda one: one, lambda one: one)
    with torch.enable_grad(), keep:
        values.requires_grad_(values.is_floating_point())
        own, fused = layer.forward(values), apply(values, discarding)

    def error(gradient: Tensor) -> float:
        wanted = [values, *tensors]
        found = [torch.autograd.grad(one, wanted, gradient.to(one.dtype)) for one in (own, fused)]
        pairs = [(own.detach(), fused.detach()), *zip(*found, strict=True)]
        # A sum of dY that is zero but for rounding, as for the bias of keys, is compared with dY.
        least = max(0.01 * float(gradient.norm()), 1e-30)
        errors = [
            float((a - b).norm()) / max(float(a.norm()), least if a.dim() == 1 else 1e-30) for a, b in pairs
        ]
        # NaN is for the check of non-finite gradients to name.
        return max((one for one in errors if math.isfinite(one)), default=0.0)

    return error
