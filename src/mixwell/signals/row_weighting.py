"""Weights of single rows: how they enter a step, and what they come to by domain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.simplex.weights import TINY
from mixwell.typing import Gradients, Json, Vector

Level = Literal["rows", "domains"]
"""Whether the weights of rows multiply their losses, or become the weights of the domains."""


SMALLEST = 1e-37
"""A mean weight below it counts as this, since its inverse is no float32."""


class RowWeighting(Signal):
    r"""Gives every row of a mixed batch a weight ``v_i``; how, is left to choose.

    The loss of row i of domain d counts ``mu_i = p_d / n_d`` in a step without it (``p`` the domains' weights,
    ``n_d`` the domain's rows in the batch), and ``mu_i f_i`` with it. The factor is ``f_i = v_i``, or, normalized,
    ``f_i = v_i / sum_k mu_k v_k``, so that the factors average to one (to zero where every ``v`` is zero). Where
    all rows count the same, ``mu_i = 1 / n``, the normalized weights ``mu_i f_i`` are ``v_i / sum_k v_k``.

    - ``level="rows"``: the factors multiply the rows' losses, and the domains' weights stay (all scores are zero).
      What a domain got over a round is in the record as ``share.<domain>``, ``~ p_d * (mean f over its rows)``.
    - ``level="domains"``: no row is weighted; that share becomes the domain's weight (with the update
      :class:`mixwell.simplex.updates.SoftmaxWeights`). ``p`` is what the weights were at first, so that a domain
      gains neither
      by having more rows in a batch nor by having gained before. A domain of which no row was seen in a round
      keeps its last mean; where every factor was zero the weights stay.

    A batch that is given in parts is normalized within each part, so every part should have rows of every domain.

    Args:
        level: which of the two.
        normalize: the factors.

    Raises:
        ValueError: there is no such level.
    """

    def __init__(self, level: Level, *, normalize: bool) -> None:
        if level not in ("rows", "domains"):
            raise ValueError(f"level must be 'rows' or 'domains', got {level!r}")
        self.level: Level = level
        self.normalize = normalize
        self._attached = False

    @abstractmethod
    def _row_weights(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor:
        """``v_i >= 0`` of the rows of a batch, shape ``(rows,)``, without a graph."""

    # ------------------------------------------------------------------------------------------- the interface

    @property
    def supports_mixed_batches(self) -> bool:
        """A mixed batch is what it weighs."""
        return True

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing need be told apart.

        Args:
            row_groups: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(CaptureContext())

    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Refuse a batch of one domain, whose rows cannot be weighted any more.

        Args:
            domain: not used.
            gradients: not used.
            scale: not used.
            weight: not used.
            rows: not used.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self!r} weighs every row, so it needs mixed batches: mixer.batch, not mixer.domain"
        )

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the run.

        Args:
            optimizer: not used here.
            parameters: what is trained.
            domains: their names.
            probes: not used here.

        Raises:
            ValueError: it is in use by another mixer, or there are other processes.
        """
        if self._attached:
            raise ValueError(
                f"this {type(self).__name__} is in use by another mixer; make a new one for each"
            )
        distributed.require_single_process(self)
        self._attached = True
        self._parameters = parameters
        self._domains = tuple(domains)
        count = len(domains)
        self._weights = self._first = np.full(count, 1 / count)
        self._means = np.ones(count)
        self._begun = False
        self._clear(count)
        self._used = 1.0

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Begin to add up.

        Args:
            round_index: its number.
            weights: of the domains, shape ``(m,)``.
            validation: not used here.
        """
        self._weights = weights.copy()
        if not self._begun:
            self._first = weights.copy()
            self._begun = True
        self._clear(len(weights))

    def begin_step(self, *, remaining: int) -> None:
        """Forget a step that had to be left out.

        Args:
            remaining: not used.
        """
        self._step = np.zeros_like(self._sums)

    def row_factors(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor | None:
        """The factors of the rows, at ``level="rows"``; ``None`` otherwise, and in the warm-up.

        Args:
            losses: of the rows, shape ``(rows,)``.
            segments: which rows belong to which domain.
            data: the rows themselves.

        Returns:
            Shape ``(rows,)``, or ``None``.
        """
        if not self._begun:
            return None
        weights = self._row_weights(losses, segments, data)
        factors = weights * self._scale(weights, self._measure(segments))
        known = factors.cpu().double().numpy()
        labels, count = segments.labels, len(self._domains)
        self._step += np.stack(
            [
                np.bincount(labels, weights=known, minlength=count),
                np.bincount(labels, weights=known > 0, minlength=count),
                segments.counts,
            ]
        )
        return factors if self.level == "rows" else None

    def end_step(self, combined: Combined) -> None:
        """The step is done.

        Args:
            combined: not used.
        """
        self._sums += self._step

    def scores(self, validation: Gradients | None) -> Vector:
        """Zeros, or at ``level="domains"`` minus the logarithm of every domain's share.

        Args:
            validation: not used here.

        Returns:
            Shape ``(m,)``.
        """
        factors, used, rows = self._sums
        means = np.where(rows > 0, factors / np.maximum(rows, 1), self._means)
        if not np.isfinite(means).all():
            return means  # for the mixer to refuse
        self._means = means
        self._used = float(used.sum() / max(rows.sum(), 1))
        if self.level == "rows":
            return np.zeros(len(self._domains))
        return -np.log(np.maximum(self._shares(), TINY))

    def summary(self) -> dict[str, float]:
        """What share of the round's steps each domain had, and what share of the rows had any weight."""
        shares = zip(self._domains, self._shares(), strict=True)
        return {f"share.{name}": float(share) for name, share in shares} | {"rows_used": self._used}

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What was added up in the round, and the weights at first."""
        kept = {"weights": self._weights, "first": self._first, "means": self._means}
        values: Json = {name: vector.tolist() for name, vector in kept.items()}
        return {**values, "sums": self._sums.tolist(), "used": self._used, "begun": self._begun}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: not used here.
        """
        self._weights, self._first, self._means = (
            np.array(values[name], dtype=np.float64) for name in ("weights", "first", "means")
        )
        self._clear(len(self._domains))
        self._sums += np.array(values["sums"], dtype=np.float64)
        self._used = float(cast("float", values["used"]))
        self._begun = bool(values["begun"])

    # ------------------------------------------------------------------------------------------- for the kinds

    def _base(self) -> Vector:
        """``p``: the weights under which rows count, shape ``(m,)``."""
        return self._weights if self.level == "rows" else self._first

    def _measure(self, segments: RowGroups) -> Vector:
        """``mu_i`` of the rows of a batch, shape ``(rows,)``."""
        return (self._base() / np.maximum(segments.counts, 1))[segments.labels]

    def _scale(self, weights: Tensor, measure: Vector) -> Tensor:
        """``f_i / v_i``, the same for all rows of a batch; one number, with the weights' graph."""
        if not self.normalize:
            return torch.ones_like(weights[0])
        average = (torch.from_numpy(measure / measure.sum()).to(weights) * weights).sum()
        return 1 / torch.where(average > 0, average.clamp(min=SMALLEST), 1.0)

    # ------------------------------------------------------------------------------------------- inside

    def _clear(self, count: int) -> None:
        # Sums over the round's rows, by domain: factors, rows with a weight, rows. Then the same of a step.
        self._sums = np.zeros((3, count))
        self._step = np.zeros((3, count))

    def _shares(self) -> Vector:
        shares = self._base() * self._means
        total = shares.sum()
        return shares / total if total > 0 else self._weights


def expect_probes(signal: Signal, probes: Probes | None, *, validation: bool) -> Probes:
    """What a signal that computes losses of rows on its own needs.

    Args:
        signal: that needs it.
        probes: what the loop offers.
        validation: whether a validation set is needed.

    Returns:
        The probes.

    Raises:
        ValueError: something is missing.
    """
    missing = ["row_losses=..."] if probes is None or not probes.has_rows else []
    if validation and (probes is None or not probes.has_validation):
        missing.append("validation=...")
    if probes is None or missing:
        raise ValueError(
            f"{signal!r} computes losses beside training: give Mixer(..., probes=Probes(model, loss, domains, "
            f"{', '.join(missing)}))"
        )
    return probes
