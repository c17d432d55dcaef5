"""No signal: the weights stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
from torch.optim import Optimizer

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Vector


@final
class ConstantWeights(Signal):
    """Measures nothing and costs nothing, for training with fixed weights: all scores are zero."""

    def __repr__(self) -> str:
        return "ConstantWeights()"

    @property
    def supports_mixed_batches(self) -> bool:
        """Nothing need be told apart."""
        return True

    @property
    def needs_validation(self) -> bool:
        """Nothing is measured."""
        return False

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing.

        Args:
            row_groups: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(CaptureContext())

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the run.

        Args:
            optimizer: not used.
            parameters: not used.
            domains: their names.
            probes: not used.
        """
        self._scores = np.zeros(len(domains))

    def scores(self, validation: Gradients | None) -> Vector:
        """Zeros.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
        return self._scores.copy()
