"""Rows for what a method computes outside of training steps, drawn from the same data in an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from mixwell.data.datasets import IndexedDataset
from mixwell.data.shuffle import ShuffledCursor
from mixwell.signals.probes import Probes
from mixwell.typing import LossFn
from mixwell.utils.nested import to_device

VALIDATION = "validation"


@final
class ProbeRows:
    """Cursors over the domains and the validation set, and the probes that draw from them.

    Args:
        row_losses: the loss of every row of a batch, if known.
        domains: rows by domain.
        rows: of a training step; a probe of a domain has an equal share of them, one of the validation set all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: LossFn,
        row_losses: LossFn | None,
        domains: Mapping[str, IndexedDataset],
        validation: IndexedDataset | None,
        *,
        rows: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._cursors: dict[str, ShuffledCursor] = {}
        share = max(1, rows // len(domains))

        def draws(name: str, data: IndexedDataset, count: int) -> Callable[[], Any]:
            cursor = ShuffledCursor(len(data), f"seed {seed}, probes, {name}")
            self._cursors[name] = cursor
            return lambda: to_device(data.batch(cursor.take(min(count, len(data)))), device)

        by_domain = {name: draws(name, data, share) for name, data in domains.items()}
        held_out = None if validation is None else draws(VALIDATION, validation, rows)
        self.probes = Probes(model, loss, by_domain, held_out, row_losses)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        taken = {name: cursor.taken for name, cursor in self._cursors.items()}
        return {"taken": taken, "spent": self.probes.spent}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        for name, cursor in self._cursors.items():
            cursor.taken = int(state["taken"][name])
        self.probes.spent = float(state["spent"])
