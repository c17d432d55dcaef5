"""The weighted sum of the domains' gradients."""

from __future__ import annotations

import itertools
from typing import Any, final

import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Gradients

# Buffers begin at multiples of this many elements, for aligned access.
ALIGNMENT = 16


@final
class WeightedSum:
    """``sum_j w_j g_j`` in one set of buffers that are kept for the whole run.

    Args:
        lazy: allocate the buffers when the first gradient is added.
        averaged: whether :meth:`all_reduce` averages it over ranks. The buffers are then views of one flat
            tensor for each dtype, so that each takes one collective.
    """

    def __init__(self, parameters: Parameters, *, lazy: bool = False, averaged: bool = False) -> None:
        self._parameters, self._averaged = parameters, averaged
        self._flats: list[Tensor] = []
        self._buffers: Gradients = [None] * len(parameters)
        self._filled = [False] * len(parameters)
        if not lazy:
            self._allocate()

    def _allocate(self) -> None:
        tensors = self._parameters.tensors
        if not self._averaged:
            self._buffers = [torch.zeros_like(p, requires_grad=False) for p in tensors]
            return
        offsets: dict[tuple[torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for index, parameter in enumerate(tensors):
            ends = offsets.setdefault((parameter.dtype, parameter.device), [(-1, 0)])
            ends.append((index, ends[-1][1] + -(-parameter.numel() // ALIGNMENT) * ALIGNMENT))
        for (dtype, device), ends in offsets.items():
            flat = torch.zeros(ends[-1][1], dtype=dtype, device=device)
            self._flats.append(flat)
            for (_, begin), (index, _) in itertools.pairwise(ends):
                parameter = tensors[index]
                self._buffers[index] = flat[begin : begin + parameter.numel()].view(parameter.shape)

    def add(self, gradients: Gradients, factor: float) -> None:
        """Add ``factor * gradients``."""
        if self._averaged and not self._flats:
            self._allocate()
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            buffer = self._buffers[i]
            if buffer is None:
                self._buffers[i] = gradient.detach() * factor
            elif self._filled[i]:
                distributed.to_local(buffer).add_(distributed.to_local(gradient.detach()), alpha=factor)
            else:
                torch.mul(distributed.to_local(gradient.detach()), factor, out=distributed.to_local(buffer))
            self._filled[i] = True

    def take(self, gradients: Gradients, factor: float) -> None:
        """Add ``factor * gradients``, and use the gradients' own memory for buffers that are not allocated yet."""
        for i, gradient in enumerate(gradients):
            if gradient is not None and self._buffers[i] is None and not self._averaged:
                self._buffers[i] = gradient.detach() if factor == 1 else gradient.detach().mul_(factor)
                self._filled[i] = True
                gradients[i] = None
        self.add(gradients, factor)

    def all_reduce(self) -> None:
        """Replace the sum by its mean over all ranks, with one collective for each dtype; all must call it.

        A parameter without a gradient on one rank counts as zero there, and has none afterwards only if no rank
        had one.
        """
        if not self._flats:
            self._allocate()
        for buffer, filled in zip(self._buffers, self._filled, strict=True):
            if buffer is not None and not filled:
                buffer.zero_()
        flags = torch.tensor(self._filled, dtype=torch.uint8, device=self._parameters.device)
        # Divide first: a sum over many ranks could overflow in half precision.
        pending: list[Any] = [
            torch.distributed.all_reduce(flat.div_(distributed.world_size()), async_op=True)
            for flat in self._flats
        ]
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        for one in pending:
            one.wait()
        self._filled = [bool(flag) for flag in flags.tolist()]

    @property
    def gradients(self) -> Gradients:
        """The sum so far, ``None`` for parameters without a gradient."""
        return [self._buffers[i] if filled else None for i, filled in enumerate(self._filled)]

    def __bool__(self) -> bool:
        return any(self._filled)

    def clear(self) -> None:
        """Begin a new sum."""
        self._filled = [False] * len(self._buffers)

    @property
    def nbytes(self) -> int:
        """The memory of the buffers, in bytes."""
        own = self._flats or [distributed.to_local(buffer) for buffer in self._buffers if buffer is not None]
        return sum(buffer.nbytes for buffer in own)
