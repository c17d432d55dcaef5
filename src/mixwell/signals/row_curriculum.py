"""Rows count by their losses beside those of the run so far: a curriculum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, cast, final

import numpy as np
import torch
from torch import Tensor

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.row_weighting import Level, RowWeighting
from mixwell.typing import Gradients, Json, Vector

Curriculum = Literal["self-paced", "linear"]


class RowCurriculum(RowWeighting):
    """Weighs rows by their loss and a moving average of the losses' percentile; how, is left to choose.

    ``lambda <- decay * lambda + (1 - decay) * (percentile of the batch's losses)`` at every step, the batch's own
    included, and divided by ``1 - decay^t`` so that its start at zero does not count. Rows enter the percentile by
    ``mu_i``. In the first part of the run all rows have weight one (burn-in).

    Args:
        level: ``"rows"`` or ``"domains"``.
        steps: that the run's rounds have together.
        percentile: of the losses, from 0 to 1.
        decay: of the moving average.
        burn_in: the share of the steps in which all rows have weight one.
        normalize: divide the weights of a batch by their mean.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        level: Level,
        *,
        steps: int,
        percentile: float,
        decay: float,
        burn_in: float,
        normalize: bool,
    ) -> None:
        super().__init__(level, normalize=normalize)
        if steps < 1:
            raise ValueError(f"steps must be those of the run, at least 1, got {steps}")
        if not (0 <= percentile <= 1 and 0 <= decay < 1 and 0 <= burn_in <= 1):
            raise ValueError(
                "the percentile and the burn-in must be in [0, 1] and the decay in [0, 1); got "
                f"{percentile}, {burn_in} and {decay}"
            )
        self.steps, self.percentile = int(steps), float(percentile)
        self.decay, self.burn_in = float(decay), float(burn_in)
        self._average, self._seen = 0.0, 0
        self._before, self._length, self._remaining = 0, 0, 0
        self._percentiles: list[tuple[float, int]] = []

    @property
    def settings(self) -> str:
        """What all curricula have, for their ``repr``."""
        return (
            f"{self.level!r}, steps={self.steps}, percentile={self.percentile!r}, decay={self.decay!r}, "
            f"burn_in={self.burn_in!r}, normalize={self.normalize}"
        )

    @abstractmethod
    def _curriculum(self, losses: Tensor, pace: float, segments: RowGroups) -> Tensor:
        """``v_i`` after the burn-in, for a ``lambda``."""

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Count the steps of the round before.

        Args:
            round_index: its number.
            weights: of the domains, shape ``(m,)``.
            validation: not used here.
        """
        super().begin_round(round_index, weights, validation)
        self._before, self._length = self._before + self._length, 0

    def begin_step(self, *, remaining: int) -> None:
        """Look at the clock.

        Args:
            remaining: steps until the end of the round, this one included.
        """
        super().begin_step(remaining=remaining)
        # Not counted one by one: a step may be begun, forgotten (a state taken in it), and begun again.
        self._length, self._remaining = max(self._length, remaining), remaining
        self._percentiles = []

    def end_step(self, combined: Combined) -> None:
        """The step's losses enter the moving average.

        Args:
            combined: not used.
        """
        super().end_step(combined)
        if self._percentiles:
            values, rows = zip(*self._percentiles, strict=True)
            self._average, self._seen = self._averaged(float(np.average(values, weights=rows)))

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What was added up, the moving average, and where the run is."""
        values, tensors = super().state()
        own: Json = {"average": self._average, "seen": self._seen}
        return {**values, **own, "before": self._before, "length": self._length}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: not used here.
        """
        super().load_state(values, tensors)
        numbers = cast("dict[str, float]", values)
        self._average, self._seen = float(numbers["average"]), int(numbers["seen"])
        self._before, self._length = int(numbers["before"]), int(numbers["length"])

    def _row_weights(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor:
        found = _percentile(losses.cpu().double().numpy(), self._measure(segments), self.percentile)
        self._percentiles.append((found, len(losses)))
        if self._done() < self.burn_in:
            return torch.ones_like(losses)
        with torch.no_grad():
            return self._curriculum(losses, self._pace(*self._averaged(found)), segments)

    def _done(self) -> float:
        """The part of the run that lies before this step."""
        return min((self._before + self._length - self._remaining) / self.steps, 1.0)

    def _averaged(self, percentile: float) -> tuple[float, int]:
        return self.decay * self._average + (1 - self.decay) * percentile, self._seen + 1

    def _pace(self, average: float, seen: int) -> float:
        return average / (1 - self.decay**seen)


@final
class GivenRowCurriculum(RowCurriculum):
    """MentorNet with a predefined curriculum (Jiang et al. 2018, Eq. 5), in closed form.

    - ``"self-paced"``: ``v_i = 1`` where ``l_i <= lambda``, else 0 (the paper's ``lambda_2 = 0``).
    - ``"linear"``: ``v_i = min(1, max(0, 1 - l_i / lambda))`` (``lambda_1 = 0``, ``lambda_2 = lambda``).

    It lives by the losses alone; a round's length only says how often what it did is told, or at
    ``level="domains"`` how often the domains' weights change.

    Args:
        curriculum: which of the two.
        level: ``"rows"``: weigh every row; ``"domains"``: give each domain the sum over its rows as its weight
            (:class:`mixwell.signals.row_weighting.RowWeighting` says how).
        steps: that the run's rounds have together.
        percentile: of a batch's losses, from 0 to 1.
        decay: of the moving average of the percentile, ``lambda`` (:class:`RowCurriculum`).
        burn_in: the share of the steps in which all rows have weight one.
        normalize: divide the weights of a batch by their mean, so that a step is as long as without them.

    Raises:
        ValueError: there is no such curriculum or level, or a number is out of range.

    References:
        Jiang, Zhou, Leung, Li, Fei-Fei, "MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks
        on Corrupted Labels" (2018); Kumar, Packer, Koller, "Self-Paced Learning for Latent Variable Models"
        (2010).
    """

    def __init__(
        self,
        curriculum: Curriculum = "self-paced",
        level: Level = "rows",
        *,
        steps: int,
        percentile: float = 0.7,
        decay: float = 0.9,
        burn_in: float = 0.2,
        normalize: bool = False,
    ) -> None:
        super().__init__(
            level, steps=steps, percentile=percentile, decay=decay, burn_in=burn_in, normalize=normalize
        )
        if curriculum not in ("self-paced", "linear"):
            raise ValueError(f"the curriculum must be 'self-paced' or 'linear', got {curriculum!r}")
        self.curriculum: Curriculum = curriculum

    def __repr__(self) -> str:
        return f"GivenRowCurriculum({self.curriculum!r}, {self.settings})"

    @property
    def needs_validation(self) -> bool:
        """The losses are all that it takes."""
        return False

    def _curriculum(self, losses: Tensor, pace: float, segments: RowGroups) -> Tensor:
        if self.curriculum == "self-paced" or pace <= 0:
            below = (losses <= pace).to(losses)
            return torch.where(losses.isnan(), losses, below)  # which compares as false, and must not vanish
        return (1 - losses / pace).clamp(0, 1)


def _percentile(losses: Vector, measure: Vector, share: float) -> float:
    """The least loss that at least this share of the rows, by their measure, do not exceed."""
    order = np.argsort(losses, kind="stable")
    reached = np.cumsum(measure[order]) / measure.sum()
    # Sums of equal parts fall short of a whole share by rounding.
    return float(losses[order[min(int(np.searchsorted(reached, share - 1e-9)), len(losses) - 1)]])
