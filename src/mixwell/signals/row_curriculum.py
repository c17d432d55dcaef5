"""Rows count by their losses relative to those of the run so far: a curriculum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements
from mixwell.signals.row_weighting import RowWeighting
from mixwell.typing import Gradients, Json, Vector

Curriculum = Literal["self-paced", "linear"]


@dataclass(eq=False)
class RowCurriculum(RowWeighting):
    """Row weights from the loss and a moving average of the losses' percentile, by a rule of the subclass.

    ``lambda <- decay * lambda + (1 - decay) * (percentile of the batch's losses)`` at every step, including the
    batch's own, and divided by ``1 - decay^t`` so that its start at zero does not count. Rows enter the percentile
    by ``mu_i``. In the first part of the run all rows have weight one (burn-in).

    Args:
        steps: the number of steps of all rounds of the run.
        percentile: of a batch's losses, from 0 to 1.
        decay: of the moving average.
        burn_in: the fraction of the steps in which all rows have weight one.

    Raises:
        ValueError: a number is out of range.
    """

    _: KW_ONLY
    steps: int
    percentile: float = 0.7
    decay: float = 0.9
    burn_in: float = 0.2

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"steps must be those of the run, at least 1, got {self.steps}")
        if not (0 <= self.percentile <= 1 and 0 <= self.decay < 1 and 0 <= self.burn_in <= 1):
            raise ValueError(
                "the percentile and the burn-in must be in [0, 1] and the decay in [0, 1); got "
                f"{self.percentile}, {self.burn_in} and {self.decay}"
            )
        self._average, self._seen = 0.0, 0
        self._before, self._length, self._remaining = 0, 0, 0
        self._percentiles: list[tuple[float, int]] = []

    @abstractmethod
    def _curriculum(self, losses: Tensor, pace: float, groups: RowGroups) -> Tensor:
        """Return ``v_i`` after the burn-in, for a ``lambda``."""

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        super().begin_round(round_index, weights, validation)
        self._before, self._length = self._before + self._length, 0

    @override
    def begin_step(self, *, remaining: int) -> None:
        super().begin_step(remaining=remaining)
        # Not counted one by one: a step may be begun, dropped (a state taken in it), and begun again.
        self._length, self._remaining = max(self._length, remaining), remaining
        self._percentiles = []

    @override
    def end_step(self, combined: Combined) -> None:
        super().end_step(combined)
        if self._percentiles:
            values, rows = zip(*self._percentiles, strict=True)
            self._average, self._seen = self._averaged(float(np.average(values, weights=rows)))

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        values, tensors = super().state()
        own: Json = {"average": self._average, "seen": self._seen}
        return {**values, **own, "before": self._before, "length": self._length}, tensors

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(values, tensors)
        numbers = cast("dict[str, float]", values)
        self._average, self._seen = float(numbers["average"]), int(numbers["seen"])
        self._before, self._length = int(numbers["before"]), int(numbers["length"])

    @override
    def _row_weights(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor:
        found = _percentile(losses.cpu().double().numpy(), self._measure(groups), self.percentile)
        self._percentiles.append((found, len(losses)))
        if self._done() < self.burn_in:
            return torch.ones_like(losses)
        with torch.no_grad():
            return self._curriculum(losses, self._pace(*self._averaged(found)), groups)

    def _done(self) -> float:
        """Return the fraction of the run before this step."""
        return min((self._before + self._length - self._remaining) / self.steps, 1.0)

    def _averaged(self, percentile: float) -> tuple[float, int]:
        return self.decay * self._average + (1 - self.decay) * percentile, self._seen + 1

    def _pace(self, average: float, seen: int) -> float:
        return average / (1 - self.decay**seen)


@final
@dataclass(eq=False)
class GivenRowCurriculum(RowCurriculum):
    """MentorNet with a predefined curriculum (Jiang et al. 2018, Eq. 5), in closed form.

    - ``"self-paced"``: ``v_i = 1`` where ``l_i <= lambda``, else 0 (the paper's ``lambda_2 = 0``).
    - ``"linear"``: ``v_i = min(1, max(0, 1 - l_i / lambda))`` (``lambda_1 = 0``, ``lambda_2 = lambda``).

    It requires the losses only; a round's length only sets how often its numbers are recorded, or at
    ``level="domains"`` how often the domains' weights change.

    Args:
        curriculum: which of the two. The other settings are those of :class:`RowCurriculum` and
            :class:`mixwell.signals.row_weighting.RowWeighting`.

    References:
        Jiang, Zhou, Leung, Li, Fei-Fei, "MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks
        on Corrupted Labels" (2018); Kumar, Packer, Koller, "Self-Paced Learning for Latent Variable Models"
        (2010).
    """

    _: KW_ONLY
    curriculum: Curriculum = "self-paced"

    requirements = Requirements(domain_batches=False, mixed_batches=True, validation=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curriculum not in ("self-paced", "linear"):
            raise ValueError(f"the curriculum must be 'self-paced' or 'linear', got {self.curriculum!r}")

    @override
    def _curriculum(self, losses: Tensor, pace: float, groups: RowGroups) -> Tensor:
        if self.curriculum == "self-paced" or pace <= 0:
            below = (losses <= pace).to(losses)
            return torch.where(losses.isnan(), losses, below)  # NaN compares as false, and must not vanish
        return (1 - losses / pace).clamp(0, 1)


def _percentile(losses: Vector, measure: Vector, share: float) -> float:
    """Return the least loss that at least this share of the rows, by their measure, do not exceed."""
    order = np.argsort(losses, kind="stable")
    reached = np.cumsum(measure[order]) / measure.sum()
    # Sums of equal parts fall short of the share by rounding.
    return float(losses[order[min(int(np.searchsorted(reached, share - 1e-9)), len(losses) - 1)]])
