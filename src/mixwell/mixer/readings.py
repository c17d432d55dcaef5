"""Numbers that the model's device computes and the host uses: losses, and whether gradients are finite.

To read a number is to wait for everything that an accelerator has been given before, so that it runs dry. So the
numbers of many steps are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

MOST = 256
"""The greatest number of readings that are kept."""


@final
class Readings:
    """Reads numbers at once on the CPU, and on an accelerator together with those of other steps.

    Args:
        at_once: whether every number is read at once, because what follows depends on it.
    """

    def __init__(self, device: torch.device, *, at_once: bool) -> None:
        self.at_once = at_once or device.type == "cpu"
        self._kept: list[tuple[Tensor, Callable[[Sequence[float]], None]]] = []

    def add(self, numbers: Tensor, use: Callable[[Sequence[float]], None]) -> None:
        """Pass some numbers, shape ``(n,)``, to a function, now or in :meth:`read`."""
        if self.at_once:
            use(numbers.tolist())
            return
        self._kept.append((numbers.detach(), use))
        if len(self._kept) >= MOST:
            self.read()

    def read(self) -> None:
        """Pass all numbers that are kept to their functions, in the order in which they were added."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        device = kept[0][0].device
        found = torch.cat([numbers.to(device) for numbers, _ in kept]).tolist()
        begin = 0
        for numbers, use in kept:
            use(found[begin : begin + len(numbers)])
            begin += len(numbers)

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()
