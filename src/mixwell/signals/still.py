"""No signal: the weights stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from mixwell.parameters import Gradients, Parameters
from mixwell.segments import Segments
from mixwell.signals.base import Signal
from mixwell.traces.base import Combined, Json
from mixwell.watching import RowWatch
from mixwell.weights import Vector


@final
class Still(Signal):
    """Measures nothing and costs nothing, for training with fixed weights: all scores are zero."""

    def __repr__(self) -> str:
        return "Still()"

    @property
    def takes_rows(self) -> bool:
        """Nothing need be told apart."""
        return True

    def rows(self, segments: Segments, weights: Vector) -> AbstractContextManager[RowWatch]:
        """Nothing.

        Args:
            segments: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(RowWatch())

    def attach(self, optimizer: Optimizer, parameters: Parameters, domains: Sequence[str]) -> None:
        """Learn of the run.

        Args:
            optimizer: not used.
            parameters: not used.
            domains: their names.
        """
        self._scores = np.zeros(len(domains))

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Nothing.

        Args:
            round_index: not used.
            weights: not used.
            validation: not used.
        """

    def begin_step(self, *, remaining: int) -> None:
        """Nothing.

        Args:
            remaining: not used.
        """

    def fold(self, domain: int, gradients: Gradients, *, scale: float, weight: float) -> None:
        """Nothing.

        Args:
            domain: not used.
            gradients: not used.
            scale: not used.
            weight: not used.
        """

    def end_step(self, combined: Combined) -> None:
        """Nothing.

        Args:
            combined: not used.
        """

    def scores(self, validation: Gradients) -> Vector:
        """Zeros.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
        return self._scores.copy()

    @property
    def nbytes(self) -> int:
        """None."""
        return 0

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Nothing."""
        return {}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Nothing.

        Args:
            values: not used.
            tensors: not used.
        """
