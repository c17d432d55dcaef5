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
        domains: rows by domain.
        validation: rows of the validation set, if there is one.
        rows: of a training step; a domain's batch is its equal share, a validation batch has that many.
        seed: of the orders.
        device: to which batches are moved.
    """

    def __init__(
        self,
        domains: Mapping[str, IndexedDataset],
        validation: IndexedDataset | None,
        *,
        rows: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._rows = {**domains, **({} if validation is None else {VALIDATION: validation})}
        self._cursors = {
            name: ShuffledCursor(len(one), f"seed {seed}, probes, {name}") for name, one in self._rows.items()
        }
        self._share, self._whole, self._device = max(1, rows // len(domains)), rows, device
        self._probes: Probes | None = None

    def probes(self, model: torch.nn.Module, loss: LossFn, row_losses: LossFn | None) -> Probes:
        """Return the probes of a method.

        Args:
            row_losses: of every row of a batch, if known.
        """
        own = {name: self._draws(name, self._share) for name in self._rows if name != VALIDATION}
        validation = self._draws(VALIDATION, self._whole) if VALIDATION in self._rows else None
        self._probes = Probes(model, loss, own, validation, row_losses)
        return self._probes

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        assert self._probes is not None
        taken = {name: cursor.taken for name, cursor in self._cursors.items()}
        return {"taken": taken, "spent": self._probes.spent}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` gave."""
        assert self._probes is not None
        for name, cursor in self._cursors.items():
            cursor.taken = int(state["taken"][name])
        self._probes.spent = float(state["spent"])

    def _draws(self, name: str, rows: int) -> Callable[[], Any]:
        def draw() -> Any:
            own = self._rows[name]
            return to_device(own.batch(self._cursors[name].take(min(rows, len(own)))), self._device)

        return draw
