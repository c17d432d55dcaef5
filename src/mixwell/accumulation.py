"""The gradient of a step, put together from those of the domains one at a time."""

from __future__ import annotations

from typing import final

import torch

from mixwell.parameters import Gradients, Parameters

TOLERANCE = 1e-6


@final
class WeightedSum:
    """``sum_j w_j g_j`` in one set of buffers that live as long as the run.

    Args:
        parameters: whose gradients are summed.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._buffers = [torch.zeros_like(p, requires_grad=False) for p in parameters.tensors]
        self._filled = [False] * len(self._buffers)

    def add(self, gradients: Gradients, factor: float) -> None:
        """Add ``factor * gradients``.

        Args:
            gradients: one per parameter.
            factor: weight times scale.
        """
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if self._filled[i]:
                self._buffers[i].add_(gradient.detach(), alpha=factor)
            else:
                torch.mul(gradient.detach(), factor, out=self._buffers[i])
                self._filled[i] = True

    @property
    def gradients(self) -> Gradients:
        """The sum so far, ``None`` for parameters that no domain touched."""
        return [b if filled else None for b, filled in zip(self._buffers, self._filled, strict=True)]

    def __bool__(self) -> bool:
        return any(self._filled)

    def clear(self) -> None:
        """Begin a new sum."""
        self._filled = [False] * len(self._buffers)

    @property
    def nbytes(self) -> int:
        """The memory of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)


@final
class Shares:
    """Which part of each domain's batch a step has seen; the parts of a domain must add up to one."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}

    def check(self, name: str, share: float, step: int) -> None:
        """Refuse a share that is out of range or one too many.

        Args:
            name: the domain.
            share: the part that is about to be computed.
            step: the number of the step, for the message.

        Raises:
            ValueError: the share is not in (0, 1], or the domain's shares would exceed one.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the share of a batch must be in (0, 1], got {share} for {name!r}")
        total = self._given.get(name, 0.0) + share
        if total > 1 + TOLERANCE:
            raise ValueError(
                f"{name!r} is given twice in step {step}: its shares sum to {total:g}. Call mixer.step() "
                "between steps; for several micro-batches in one step give each its share, as in "
                "mixer.domain(name, share=1/4)"
            )

    def give(self, name: str, share: float) -> None:
        """A part was computed.

        Args:
            name: the domain.
            share: the part.
        """
        self._given[name] = self._given.get(name, 0.0) + share

    def of(self, name: str) -> float:
        """The part of a domain so far.

        Args:
            name: the domain.

        Returns:
            Between 0 and 1.
        """
        return self._given.get(name, 0.0)

    def complete(self, name: str) -> bool:
        """Whether the parts of a domain add up to one.

        Args:
            name: the domain.

        Returns:
            Whether they do.
        """
        return self.of(name) >= 1 - TOLERANCE

    def __bool__(self) -> bool:
        return bool(self._given)

    def clear(self) -> None:
        """Begin a new step."""
        self._given = {}
