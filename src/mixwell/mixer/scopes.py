"""The scopes of ``with mixer.domain(...)``, ``mixer.validation()`` and ``mixer.batch(...)``."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.mixer.batch import DomainBatch
from mixwell.signals.base import RowFactors, Signal
from mixwell.typing import Gradients, Vector

# The rounding that is allowed in a factor of 1 (a division and a multiplication by the number of micro-batches).
FACTOR_TOLERANCE = 1e-2
USE = "call batch.weighted_loss(losses).backward() in `with mixer.batch(...) as batch:`"


@final
class DomainScope:
    """Records the loss of one domain, or of validation."""

    def __init__(self, batch: DomainBatch) -> None:
        self.batch = batch
        self.scaled = False
        """Whether :meth:`scaled_loss` was called."""
        self.loss: Tensor | None = None
        """The sum of the recorded mean losses."""
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        """The recorded losses, and those of a reference model on the same rows."""
        self.gradients: Gradients = []

    def record_loss(self, loss: Tensor | float, *, reference: Tensor | float | None = None) -> None:
        """Record the loss, so that it is checked and in the records; some signals require it.

        Args:
            loss: the mean loss, or the losses of rows or tokens, of which the mean is recorded. Several losses
                of one scope are added up, as their gradients are.
            reference: the losses of a reference model on the same rows, of the same shape.
        """
        losses = torch.as_tensor(loss).detach()
        if not losses.numel():
            raise ValueError("record_loss takes the mean loss or the losses of rows; got none")
        other = None if reference is None else torch.as_tensor(reference).detach().to(losses)
        if other is not None:
            _expect_same_shape(losses, other)
        self.losses.append((losses, other))
        mean = losses.mean() if losses.is_floating_point() else losses.double().mean()
        self.loss = mean if self.loss is None else self.loss + mean

    def scaled_loss(
        self, loss: Tensor, *, reference: Tensor | float | None = None, objective: Tensor | None = None
    ) -> Tensor:
        """Record the mean loss and return the loss to call ``.backward()`` on: the loss times the rank scale.

        Required where ranks have different numbers of rows of a domain (``DomainBatch.rank_scale``): gradients
        may be averaged over ranks during the backward pass. Elsewhere it is the loss itself.

        Args:
            loss: the mean loss of the rows that are computed here.
            objective: what to minimize in place of the loss.
        """
        self.record_loss(loss, reference=reference)
        self.scaled = True
        minimized = loss if objective is None else objective
        return minimized if self.batch.rank_scale == 1 else minimized * self.batch.rank_scale

    def recorded(self) -> tuple[Tensor, Tensor | None]:
        """Return the recorded losses and those of a reference model; of several the sums of their means."""
        if len(self.losses) == 1:
            return self.losses[0]
        others = [other.float().mean() for _, other in self.losses if other is not None]
        means = torch.stack([losses.float().mean() for losses, _ in self.losses])
        return means.sum(), torch.stack(others).sum() if len(others) == len(means) else None


@final
class BatchScope:
    """Weights the losses of a mixed batch's rows.

    Args:
        expected: the expected count of each domain, shape ``(m,)``.
        signal: may weight rows by more than their domain.
        counted: whether each row counts, shape ``(rows,)``; ``None`` for all.
    """

    def __init__(
        self,
        groups: RowGroups,
        expected: Vector,
        weights: Vector,
        capture: CaptureContext,
        signal: Signal,
        counted: NDArray[np.bool_] | None = None,
    ) -> None:
        self.groups, self.expected, self._counted = groups, expected, counted
        factors = (weights / expected)[groups.labels]
        self._factors = torch.from_numpy(factors if counted is None else np.where(counted, factors, 0.0))
        self._capture, self._signal = capture, signal
        self._factor: Tensor | None = None  # the derivative of what was propagated by the weighted loss
        self.losses: Tensor | None = None
        """The loss of every row, shape ``(rows,)``, after :meth:`weighted_loss`."""
        self.recorded: tuple[Tensor, Tensor | None] | None = None
        """The losses of rows or tokens and those of a reference model, after :meth:`weighted_loss`."""

    def weighted_loss(
        self,
        losses: Tensor,
        *,
        reference: Tensor | None = None,
        objective: Tensor | None = None,
        data: Any = None,
    ) -> Tensor:
        """Return the loss to call ``.backward()`` on, ``sum_i w_d(i) / e_d(i) * loss_i`` with d(i) row i's domain.

        Args:
            losses: one per row, or with more dimensions after the first (tokens), over which the mean is taken.
            reference: the losses of a reference model, of the same shape, for signals that need it.
            objective: what to minimize in place of the losses, of the same shape.
            data: the rows themselves, for signals that weight every row.
        """
        if self.losses is not None:
            raise RuntimeError("weighted_loss was called twice in one block; open a block for each batch")
        if losses.dim() < 1 or losses.shape[0] != len(self.groups):
            raise ValueError(
                f"weighted_loss takes one loss for each of the {len(self.groups)} rows (cross_entropy(..., "
                f"reduction='none')); got shape {tuple(losses.shape)}"
            )
        if reference is not None:
            _expect_same_shape(losses, reference)
        self.recorded = losses.detach(), None if reference is None else reference.detach()
        losses, minimized = _by_row(losses), _by_row(losses if objective is None else objective)
        if self._counted is not None:
            # Filled, not multiplied by 0: a mean over no tokens may be NaN.
            left_out = torch.from_numpy(~self._counted).to(losses.device)
            losses, minimized = losses.masked_fill(left_out, 0), minimized.masked_fill(left_out, 0)
        self.losses = losses.detach()
        # Losses in bfloat16 would round the weights to three digits.
        weighted = minimized * self._factors.to(
            losses.device, torch.promote_types(losses.dtype, torch.float32)
        )
        if isinstance(self._signal, RowFactors):
            factors = self._signal.row_factors(self.losses, self.groups, data)
            weighted = weighted if factors is None else weighted * factors.to(losses)
        self._capture.weighted(weighted)
        total = weighted.sum()
        if total.requires_grad:
            total.register_hook(self._propagated)
        return total

    def _propagated(self, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self._factor = gradient if self._factor is None else self._factor + gradient

    def propagated(self, step: int) -> Tensor:
        """Return the factor of the weighted loss in what was propagated, a scalar on the device of the losses.

        Raises:
            ValueError: another loss than the weighted one was propagated.
        """
        if self.losses is None:
            raise ValueError(
                f"the loss of the mixed batch at step {step} did not go through batch.weighted_loss, so the "
                f"weights of the domains are not in its gradient: {USE}"
            )
        if self._factor is None:
            raise ValueError(
                f"batch.weighted_loss was called at step {step}, but another loss was propagated, without the "
                f"weights of the domains: {USE}, and compute other losses in `with mixer.auxiliary():`"
            )
        return self._factor

    @cached_property
    def sums(self) -> Tensor:
        """The sum of the losses of each domain's rows that count, shape ``(m,)``, on their device."""
        assert self.losses is not None
        # Those that do not count have a loss of 0. Not every device has float64.
        wide = torch.float64 if self.losses.device.type in ("cpu", "cuda") else torch.float32
        return self.groups.sums(self.losses.to(wide))

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of rows that count of each domain, shape ``(m,)``."""
        return self.groups.counts_where(self._counted)

    def recorded_of(self, domain: int) -> tuple[Tensor, Tensor | None]:
        """Return the losses of a domain's rows that count, and those of a reference model."""
        assert self.recorded is not None
        chosen = self.groups.labels == domain
        if self._counted is not None:
            chosen &= self._counted
        losses, reference = self.recorded
        # Indices, since the number of true elements of a mask on an accelerator is read first.
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(losses.device)
        return losses[rows], None if reference is None else reference[rows]


def expect_factor(factor: float, step: int) -> None:
    """Raise a ValueError for a factor of the weighted loss above 1, or not above 0.

    A term that is added to the weighted loss is not seen; ``mixer.auxiliary()`` is for those. Factors below 1 are
    accepted, since trainers divide by the number of micro-batches.
    """
    if not 0 < factor <= 1 + FACTOR_TOLERANCE:
        raise ValueError(
            f"the weighted loss was multiplied by {factor:g} before .backward() at step {step}, so the optimizer "
            "would step with a gradient that much larger (a GradScaler does this; train in bfloat16 without one): "
            f"{USE}; multiply the losses themselves where that is meant"
        )


def _by_row(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses


def _expect_same_shape(losses: Tensor, reference: Tensor) -> None:
    if reference.shape != losses.shape:
        raise ValueError(
            f"the losses have shape {tuple(losses.shape)}, those of the reference model "
            f"{tuple(reference.shape)}; both must be of the same rows"
        )
