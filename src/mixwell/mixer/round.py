"""One round: its mean losses, its validation gradients and the scores at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from torch import Tensor

from mixwell import distributed
from mixwell.distributed.consistency import check_weights_in_sync
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.gradient_sum import WeightedSum
from mixwell.mixer.nonfinite import NonFiniteGuard
from mixwell.mixer.scopes import DomainScope
from mixwell.mixer.step import VALIDATION
from mixwell.signals import Signal
from mixwell.signals.base import LinearSignal
from mixwell.typing import Gradients, Vector

# Found by all ranks at once, each of which counts them.
COMMON = ("batch", "combined gradient", VALIDATION)


@final
class RoundAccumulator:
    """Accumulates a round.

    Args:
        names: the domains.
        parameters: the trained parameters.
        signal: computes the scores.
        nonfinite: decides what happens to gradients and scores that are not finite.
        averaged: whether validation gradients are averaged over ranks here.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Parameters,
        signal: Signal,
        nonfinite: NonFiniteGuard,
        *,
        averaged: bool,
    ) -> None:
        self._names, self._parameters = tuple(names), parameters
        self._signal, self._nonfinite, self._averaged = signal, nonfinite, averaged
        self.begun = False
        """Whether the signal knows that the round has begun."""
        self.clear()

    def clear(self) -> None:
        """Begin a new round."""
        self._validation: WeightedSum | None = None
        self._validation_lost = False
        self._nonfinite.in_round = {}
        self.losses = LossMeans()
        self.scores = RoundScores()
        self.points_lost = 0
        """The validation points without scores."""

    @property
    def points_done(self) -> int:
        """The number of validation points so far."""
        return len(self.scores.points) + self.points_lost

    def add_validation(self, scope: DomainScope, *, accepted: bool, only_point: bool) -> None:
        """Add a part of a validation gradient.

        Args:
            only_point: whether the round has no other validation point.
        """
        if not accepted:
            self._validation_lost = True
            return
        part = scope.batch
        if self._validation is None:
            self._validation = self._new_sum()
        # The score of a part needs its gradient over all ranks, which exists of the whole only.
        if (
            part.fraction < 1
            and only_point
            and isinstance(self._signal, LinearSignal)
            and distributed.is_single_process()
        ):
            self.scores.add_part(part.fraction, self._signal.scores(scope.gradients))
        self._validation.take(scope.gradients, part.fraction)
        self.losses.add(VALIDATION, scope.loss, part.fraction * part.rank_scale)

    def end_point(self, step: int, round_index: int) -> Gradients | None:
        """Score the complete validation gradient of a point, and return it; ``None`` if a part had to be skipped.

        Args:
            step: the number of steps of the round before it.
        """
        if not distributed.is_single_process():
            if self._nonfinite.policy == "skip":
                self._validation_lost = distributed.any_rank(self._validation_lost, self._parameters.device)
            if self._averaged and not self._validation_lost:
                self._validation = self._validation or self._new_sum()
                self._validation.all_reduce()
        lost = self._validation_lost or self._validation is None
        validation = None if lost or self._validation is None else self._validation.gradients
        if validation is None or not self.add_scores(step, validation, round_index):
            self.points_lost += 1
        self._validation, self._validation_lost = None, False
        return validation

    def add_scores(self, step: int, validation: Gradients | None, round_index: int) -> bool:
        """Add the signal's scores; return whether they are finite and there was a step to score."""
        if not self.begun:
            return False
        scores = self._signal.scores(validation)
        wrong = [n for n, s in zip(self._names, scores, strict=True) if not np.isfinite(s)]
        if wrong:
            self._nonfinite.reject(
                VALIDATION,
                f"the score of {', '.join(wrong)} overflowed in round {round_index}",
                "Lower the learning rate, shorten the horizon, or raise the curvature",
            )
            return False
        self.scores.add(step, scores)
        return True

    def _new_sum(self) -> WeightedSum:
        return WeightedSum(self._parameters, lazy=True, averaged=self._averaged)

    def sync(self, weights: Vector, round_index: int) -> None:
        """Check that all ranks have the same weights, and merge their losses and skipped contributions.

        Raises:
            RuntimeError: a rank has other weights.
        """
        if distributed.is_single_process():
            return
        recorded, counted = [*self._names, VALIDATION], [*self._names, *COMMON]
        sums = [self.losses.sums.get(name, (0.0, 0.0)) for name in recorded]
        skipped = [float(self._nonfinite.in_round.get(name, 0)) for name in counted]
        own = np.concatenate([weights, np.ravel(sums), skipped])
        found = distributed.all_gather_array(own, self._parameters.device)
        check_weights_in_sync(found[:, : len(self._names)], self._names, round_index=round_index)
        ends = np.cumsum([len(self._names), 2 * len(recorded)])
        totals = found[:, ends[0] : ends[1]].sum(axis=0).reshape(-1, 2)
        self.losses.sums = {
            name: (total, count)
            for name, (total, count) in zip(recorded, totals.tolist(), strict=True)
            if count
        }
        for name, column in zip(counted, found[:, ends[1] :].T, strict=True):
            # Ranks of a sharded model skip the same contributions.
            everywhere = int(column.max() if self._parameters.sharded or name in COMMON else column.sum())
            before = self._nonfinite.total.get(name, 0) - self._nonfinite.in_round.get(name, 0)
            if everywhere:
                self._nonfinite.in_round[name] = everywhere
                self._nonfinite.total[name] = before + everywhere

    def state(self) -> dict[str, Any]:
        """Return what a run resumed in mid-round needs, as plain values."""
        return {
            "round_begun": self.begun,
            "losses": {name: list(sums) for name, sums in self.losses.sums.items()},
            "points": self.scores.state(),
            "points_lost": self.points_lost,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        self.clear()
        self.begun = bool(values["round_begun"])
        self.losses.sums = {name: (total, count) for name, (total, count) in values["losses"].items()}
        self.scores.load_state(values["points"])
        self.points_lost = int(values["points_lost"])


@final
class LossMeans:
    """The means of the losses that were recorded in a round, by domain."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        """By domain the sum of fraction times loss, and the sum of fractions."""

    def add(self, name: str, loss: Tensor | float | None, fraction: float) -> None:
        """Add the loss of a fraction of a batch, if it was recorded."""
        if loss is not None:
            total, count = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + fraction * float(loss), count + fraction)

    def means(self) -> dict[str, float]:
        """Return the mean loss of every domain that has one."""
        return {name: total / count for name, (total, count) in self.sums.items()}


@final
class RoundScores:
    """The scores at the validation points of a round, their mean and its standard error."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Vector]] = []
        """The step of the round and the scores of every point, shape ``(m,)``."""
        self._parts: list[tuple[float, Vector]] = []

    def add(self, step: int, scores: Vector) -> None:
        """Add a point after ``step`` >= 1 steps of the round, with finite scores, shape ``(m,)``."""
        self.points.append((step, scores))

    def add_part(self, fraction: float, scores: Vector) -> None:
        """Add the scores of a part of the only point's batch, from which the noise of that batch is estimated."""
        self._parts.append((fraction, scores))

    def mean(self) -> Vector | None:
        """Return the mean over the points, shape ``(m,)``; ``None`` where there are none."""
        if not self.points:
            return None
        # Divide first, so that finite scores have a finite mean.
        return np.sum([scores / len(self.points) for _, scores in self.points], axis=0)

    def standard_errors(self) -> Vector | None:
        """Return the standard error of the mean score of every domain.

        Scores grow in proportion to the number of steps that the traces look back over, so the noise of k points
        after ``t_i`` steps is what remains without that growth, ``r_i = h_i - t_i sum h / sum t``, and the
        standard error is ``sqrt(sum_i r_i^2 / (k (k - 1)))``. It contains the noise of the iterates and of the
        validation batches, not that of the traces, which the points share. For one point that was computed in k
        parts with fractions ``s_i`` it is ``sqrt(k / (k - 1) * sum_i s_i^2 (h_i - h)^2)``, the noise of its batch
        only.

        Returns:
            Shape ``(m,)``; ``None`` where there are no two points or parts, or they are too large.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if len(self.points) > 1:
                steps = np.array([[float(step)] for step, _ in self.points])
                scores = np.stack([one for _, one in self.points])
                left = scores - steps * (scores.sum(axis=0) / steps.sum())
                variance = (left**2).sum(axis=0) / (len(scores) * (len(scores) - 1))
            elif self.points and len(self._parts) > 1:
                fractions = np.array([[fraction] for fraction, _ in self._parts])
                scores = np.stack([one for _, one in self._parts])
                mean = (fractions * scores).sum(axis=0) / fractions.sum()
                variance = (fractions**2 * (scores - mean) ** 2).sum(axis=0) * len(scores) / (len(scores) - 1)
            else:
                return None
        return np.sqrt(variance) if np.isfinite(variance).all() else None

    def state(self) -> list[tuple[int, list[float]]]:
        """Return the points as plain values."""
        return [(step, scores.tolist()) for step, scores in self.points]

    def load_state(self, state: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Take up what :meth:`state` returned."""
        self.points = [(int(step), np.array(scores, dtype=np.float64)) for step, scores in state]
