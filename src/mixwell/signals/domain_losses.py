"""Signals that require nothing but the losses of the training steps, and the plainest of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Json, Vector

Absent = Literal["last", "zero"]
"""What a domain counts with in a step without it: the number that it was last seen with, or nothing."""


class LossSignal(Signal):
    """Recorded losses, as one number per domain and step, for a subclass to use.

    Nothing is computed outside of the training step, and mixed batches need no hooks. A domain's number is the
    mean over the parts of its batch by their fractions; with several processes the mean over all of them, for
    which they exchange 2 m numbers in a step.
    """

    requirements = Requirements(domain_batches=False, validation=False, losses=True)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._step = np.zeros((2, len(self._domains)))  # fraction times loss, and fraction

    @override
    def begin_step(self, *, remaining: int) -> None:
        self._step[:] = 0

    @override
    def record_loss(
        self, domain: int, losses: Tensor, *, fraction: float, reference: Tensor | None = None
    ) -> None:
        self._step[:, domain] += fraction * self._value(domain, losses, reference), fraction

    @override
    def end_step(self, combined: Combined) -> None:
        sums, fractions = self._mean_over_ranks(self._step)
        self._take(np.divide(sums, fractions, out=np.full(len(sums), np.nan), where=fractions > 0))

    def _value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float:
        """Return the number that losses count with, by default their mean."""
        return mean_of(losses)

    @abstractmethod
    def _take(self, losses: Vector) -> None:
        """Take the numbers of a step, NaN for absent domains, shape ``(m,)``."""

    def _mean_over_ranks(self, numbers: Vector) -> Vector:
        device = self._parameters.tensors[0].device
        return distributed.all_reduce_sum(numbers, device) / distributed.world_size()

    @property
    @override
    def nbytes(self) -> int:
        return self._step.nbytes + sum(tensor.nbytes for tensor in self.state()[1].values())


class SummedLosses(LossSignal):
    """Numbers of the steps, summed over a round: the sum of T single updates while the weights are held.

    Args:
        absent: what a domain adds in a step without it.

    Raises:
        ValueError: there is no such choice.
    """

    def __init__(self, absent: Absent) -> None:
        if absent not in ("last", "zero"):
            raise ValueError(f"absent must be 'last' or 'zero', got {absent!r}")
        self.absent: Absent = absent
        self._steps = 0

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._totals, self._last = np.zeros(len(self._domains)), np.zeros(len(self._domains))

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._totals[:] = 0
        self._steps = 0

    @override
    def _take(self, losses: Vector) -> None:
        present = ~np.isnan(losses)
        self._last[present] = losses[present]
        self._totals += self._last if self.absent == "last" else np.where(present, losses, 0.0)
        self._steps += 1

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        return -self._totals

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        tensors = {"totals": torch.from_numpy(self._totals), "last": torch.from_numpy(self._last)}
        return {"steps": self._steps}, tensors

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        self._steps = cast("int", values["steps"])
        self._totals[:] = tensors["totals"].cpu().numpy()
        self._last[:] = tensors["last"].cpu().numpy()


@final
class DomainLosses(SummedLosses):
    """The losses themselves: domains with a high loss get more weight (Group DRO).

        ``score_j = -sum over the steps of (l_j + C / sqrt(n_j))``

    With ``MirrorDescent(eta_q)`` and T = 1 this is ``q_j ~ q_j exp(eta_q (l_j + C / sqrt(n_j)))``. A longer round
    takes the T steps' updates in one, with the weights held.

    Args:
        size_adjustment: C, which adds to the loss of small domains, where the training loss says least about the
            true one.
        rows: n_j by domain; required where C is not 0.
        absent: what a domain adds in a step without it: ``"zero"``, or its ``"last"`` loss.

    Raises:
        ValueError: C is negative, or is given without the rows.

    References:
        Sagawa, Koh, Hashimoto, Liang: Distributionally robust neural networks for group shifts (2020),
        Algorithm 1 and Eq. 5.
    """

    def __init__(
        self,
        size_adjustment: float = 0.0,
        rows: Mapping[str, int] | None = None,
        *,
        absent: Absent = "zero",
    ) -> None:
        super().__init__(absent)
        if not (math.isfinite(size_adjustment) and size_adjustment >= 0):
            raise ValueError(f"the size adjustment C must be finite and not negative, got {size_adjustment}")
        wrong = {name: count for name, count in (rows or {}).items() if not count > 0}
        if wrong:
            raise ValueError(f"the rows of a domain must be positive, got {wrong}")
        if size_adjustment and rows is None:
            raise ValueError(
                f"the size adjustment C = {size_adjustment} needs the number of rows of every domain: rows={{...}}"
            )
        self.size_adjustment = float(size_adjustment)
        self.row_counts = None if rows is None else dict(rows)

    def __repr__(self) -> str:
        return f"DomainLosses({self.size_adjustment!r}, {self.row_counts!r}, absent={self.absent!r})"

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._added = np.zeros(len(self._domains))
        if self.size_adjustment:
            counts = self.row_counts or {}
            missing = [name for name in self._domains if name not in counts]
            if missing:
                raise ValueError(f"the size adjustment needs the rows of {', '.join(missing)}; got {counts}")
            self._added = self.size_adjustment / np.sqrt([float(counts[name]) for name in self._domains])

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        return -(self._totals + self._steps * self._added)


def mean_of(losses: Tensor) -> float:
    """Return the mean of losses, in float32 or better."""
    return float((losses if losses.dtype == torch.float64 else losses.float()).mean())
