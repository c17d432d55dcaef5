"""What methods that weight single rows share: how weights enter a step, and the domains' shares that follow."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements, RowFactors, Signal, scores_of_weights
from mixwell.signals.checks import require_choice
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Vector

Level = Literal["rows", "domains"]
"""Whether the weights of rows multiply their losses, or become the weights of the domains."""
SMALLEST = 1e-37
"""The least mean weight with a finite inverse in float32."""


@dataclass(eq=False)
class RowWeighting(Signal, RowFactors):
    r"""A weight ``v_i`` for every row of a mixed batch, by a rule of the subclass.

    The loss of row i of domain d counts ``mu_i = p_d / n_d`` in a step without it (``p`` the domains' weights,
    ``n_d`` the domain's rows in the batch), and ``mu_i f_i`` with it. The factor is ``f_i = v_i``, or, normalized,
    ``f_i = v_i / sum_k mu_k v_k``, so that the factors average to one (to zero where every ``v`` is zero). Where
    all rows count the same, ``mu_i = 1 / n``, the normalized weights ``mu_i f_i`` are ``v_i / sum_k v_k``.

    - ``level="rows"``: the factors multiply the rows' losses, and the domains' weights stay (all scores are zero).
      A domain's share of a round is in the record as ``share.<domain>``, ``~ p_d * (mean f over its rows)``.
    - ``level="domains"``: no row is weighted; that share becomes the domain's weight (with the update
      :class:`mixwell.simplex.updates.SoftmaxWeights`). ``p`` is the initial weights, so that a domain gains
      neither by having more rows in a batch nor by having gained before. A domain without rows in a round keeps
      its last mean; where every factor was zero the weights stay.

    A batch that is given in parts is normalized within each part, so every part should have rows of every domain.

    Args:
        level: ``"rows"`` or ``"domains"``.
        normalize: whether the factors are normalized, so that a step is as long as without them.
    """

    level: Level = "rows"
    _: KW_ONLY
    normalize: bool = False

    requirements = Requirements(domain_batches=False, mixed_batches=True)
    _saved = ("_begun", "_used", "_weights", "_first", "_means", "_sums")

    def __post_init__(self) -> None:
        require_choice(Level, level=self.level)

    @abstractmethod
    def _row_weights(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor:
        """Return ``v_i >= 0`` of the rows of a batch, shape ``(rows,)``, without a graph."""

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        distributed.require_single_process(self)
        count = len(self._domains)
        self._weights, self._first = np.full(count, 1 / count), np.full(count, 1 / count)
        self._means = np.ones(count)
        self._begun, self._used = False, 1.0
        # By domain: the sum of the factors, rows with a positive factor, rows; of the round, and of the step.
        self._sums, self._step = np.zeros((3, count)), np.zeros((3, count))

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights
        if not self._begun:
            self._first[:] = weights
            self._begun = True
        self._sums[:] = 0

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        self._step[:] = 0

    @final
    @override
    def row_factors(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor | None:
        """Return the factors of the rows at ``level="rows"``; ``None`` otherwise, and in the warmup."""
        if not self._begun:
            return None
        weights = self._row_weights(losses, groups, data)
        factors = weights * self._scale(weights, self._measure(groups))
        known = factors.cpu().double().numpy()
        labels, count = groups.labels, len(self._domains)
        self._step += np.stack(
            [
                np.bincount(labels, weights=known, minlength=count),
                np.bincount(labels, weights=known > 0, minlength=count),
                groups.counts,
            ]
        )
        return factors if self.level == "rows" else None

    @override
    def end_step(self, combined: Combined) -> None:
        self._sums += self._step

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        """Return zeros, or at ``level="domains"`` minus the logarithm of every domain's share."""
        factors, used, rows = self._sums
        means = np.where(rows > 0, factors / np.maximum(rows, 1), self._means)
        if not np.isfinite(means).all():
            return means  # the mixer refuses it
        self._means[:] = means
        self._used = float(used.sum() / max(rows.sum(), 1))
        if self.level == "rows":
            return np.zeros(len(self._domains))
        return scores_of_weights(self._shares())

    @override
    def summary(self) -> dict[str, float]:
        """Return every domain's share of the round's steps, and the share of the rows with a positive weight."""
        shares = zip(self._domains, self._shares(), strict=True)
        return {f"share.{name}": float(share) for name, share in shares} | {"rows_used": self._used}

    def _base(self) -> Vector:
        """Return ``p``, the weights by which rows count, shape ``(m,)``."""
        return self._weights if self.level == "rows" else self._first

    def _measure(self, groups: RowGroups) -> Vector:
        """Return ``mu_i`` of the rows of a batch, shape ``(rows,)``."""
        return (self._base() / np.maximum(groups.counts, 1))[groups.labels]

    def _scale(self, weights: Tensor, measure: Vector) -> Tensor:
        """Return ``f_i / v_i``, the same for all rows of a batch: one number, with the weights' graph."""
        if not self.normalize:
            return torch.ones_like(weights[0])
        average = (torch.from_numpy(measure / measure.sum()).to(weights) * weights).sum()
        return 1 / torch.where(average > 0, average.clamp(min=SMALLEST), 1.0)

    def _shares(self) -> Vector:
        shares = self._base() * self._means
        total = shares.sum()
        return shares / total if total > 0 else self._weights
