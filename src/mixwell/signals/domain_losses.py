"""Signals that live by the losses of the training steps alone, and the plainest of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, cast, final

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
from mixwell.typing import Gradients, Json, Vector

Absent = Literal["last", "zero"]
"""What a domain counts with in a step that it is not in: what it had when it was last seen, or nothing."""


class LossSignal(Signal):
    """Losses that are told, as one number per domain and step; what to do with them is left to say.

    Nothing is computed beside training, and mixed batches need not be told apart by hooks. A domain's number is
    the mean over the parts of its batch by their shares; with several processes that over all of them, for which
    they exchange 2 m numbers in a step.
    """

    def __init__(self) -> None:
        self._attached = False

    @property
    def supports_mixed_batches(self) -> bool:
        """The losses of a mixed batch's rows are known."""
        return True

    @property
    def needs_validation(self) -> bool:
        """The training losses say all."""
        return False

    @property
    def needs_losses(self) -> bool:
        """They are what it lives by."""
        return True

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing; the mixer tells the losses.

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
        """Learn of the domains.

        Args:
            optimizer: not used.
            parameters: only their device, on which processes exchange numbers.
            domains: their names.
            probes: not used.

        Raises:
            ValueError: it is in use by another mixer, whose losses it holds.
        """
        if self._attached:
            raise ValueError(
                f"this {type(self).__name__} is in use by another mixer; make a new one for each"
            )
        self._device = parameters.tensors[0].device
        self._domains = tuple(domains)
        self._step = np.zeros((2, len(domains)))  # share times loss, and share
        self._attached = True

    def begin_step(self, *, remaining: int) -> None:
        """Forget a step that was begun and left out.

        Args:
            remaining: not used.
        """
        self._step[:] = 0

    def record_loss(
        self, domain: int, losses: Tensor, *, share: float, reference: Tensor | None = None
    ) -> None:
        """Take a domain's losses.

        Args:
            domain: which.
            losses: of its rows or tokens, or their mean.
            share: the part of the domain's batch in this step that they are of.
            reference: the losses of a reference model, where they are needed.
        """
        self._step[:, domain] += share * self.value(domain, losses, reference), share

    def end_step(self, combined: Combined) -> None:
        """The losses of the step are there.

        Args:
            combined: not used.
        """
        sums, shares = self.over_processes(self._step)
        self.take(np.divide(sums, shares, out=np.full(len(sums), np.nan), where=shares > 0))

    def value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float:
        """The number that losses count with.

        Args:
            domain: whose.
            losses: of its rows or tokens, or their mean.
            reference: those of a reference model, where they are needed.

        Returns:
            Their mean.
        """
        return mean_of(losses)

    @abstractmethod
    def take(self, losses: Vector) -> None:
        """A step has ended.

        Args:
            losses: a number by domain, NaN for those that were not in it, shape ``(m,)``.
        """

    def over_processes(self, numbers: Vector) -> Vector:
        """The mean of numbers over all processes.

        Args:
            numbers: of this one.

        Returns:
            The numbers themselves where there is only one.
        """
        return distributed.all_reduce_sum(numbers, self._device) / distributed.world_size()

    @property
    def nbytes(self) -> int:
        """The memory of a few numbers per domain."""
        return self._step.nbytes + sum(tensor.nbytes for tensor in self.state()[1].values())


class SummedLosses(LossSignal):
    """Numbers of the steps, summed over a round: what T single steps add up to while the weights are held.

    Args:
        absent: what a domain adds in a step that it is not in.

    Raises:
        ValueError: there is no such choice.
    """

    def __init__(self, absent: Absent) -> None:
        super().__init__()
        if absent not in ("last", "zero"):
            raise ValueError(f"absent must be 'last' or 'zero', got {absent!r}")
        self.absent: Absent = absent
        self._steps = 0

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the domains.

        Args:
            optimizer: not used.
            parameters: only their device.
            domains: their names.
            probes: not used.
        """
        super().attach(optimizer, parameters, domains, probes)
        self._totals, self._last = np.zeros(len(domains)), np.zeros(len(domains))

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Begin a new sum; what a domain was last seen with stays.

        Args:
            round_index: not used.
            weights: not used.
            validation: not used.
        """
        self._totals[:] = 0
        self._steps = 0

    def take(self, losses: Vector) -> None:
        """Add a step.

        Args:
            losses: a number by domain, NaN for those that were not in it, shape ``(m,)``.
        """
        there = ~np.isnan(losses)
        self._last[there] = losses[there]
        self._totals += self._last if self.absent == "last" else np.where(there, losses, 0.0)
        self._steps += 1

    def scores(self, validation: Gradients | None) -> Vector:
        """The negative sum over the round.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
        return -self._totals

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The sums so far, and what every domain was last seen with."""
        tensors = {"totals": torch.from_numpy(self._totals), "last": torch.from_numpy(self._last)}
        return {"steps": self._steps}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: the number of steps.
            tensors: the sums.
        """
        self._steps = cast("int", values["steps"])
        self._totals[:] = tensors["totals"].cpu().numpy()
        self._last[:] = tensors["last"].cpu().numpy()


@final
class DomainLosses(SummedLosses):
    """The losses themselves: domains with a high loss get more weight (Group DRO).

        ``score_j = -sum over the steps of (l_j + C / sqrt(n_j))``

    With ``MirrorDescent(eta_q)`` and T = 1 this is ``q_j ~ q_j exp(eta_q (l_j + C / sqrt(n_j)))``. A longer round
    does in one move what its T steps would add up to with the weights held.

    Args:
        size_adjustment: C, which adds to the loss of small domains, whose training loss says least of their true
            one.
        rows: n_j by domain; needed where C is not 0.
        absent: what a domain adds in a step that it is not in: ``"zero"``, or its ``"last"`` loss.

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

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the domains.

        Args:
            optimizer: not used.
            parameters: only their device.
            domains: their names.
            probes: not used.

        Raises:
            ValueError: the rows of a domain are not known.
        """
        self._added = np.zeros(len(domains))
        if self.size_adjustment:
            counts = self.row_counts or {}
            missing = [name for name in domains if name not in counts]
            if missing:
                raise ValueError(f"the size adjustment needs the rows of {', '.join(missing)}; got {counts}")
            self._added = self.size_adjustment / np.sqrt([float(counts[name]) for name in domains])
        super().attach(optimizer, parameters, domains, probes)

    def scores(self, validation: Gradients | None) -> Vector:
        """The negative sum of the adjusted losses.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
        return -(self._totals + self._steps * self._added)


def mean_of(losses: Tensor) -> float:
    """The mean of losses, which may be of low precision.

    Args:
        losses: any number of them.

    Returns:
        One number.
    """
    return float((losses if losses.dtype == torch.float64 else losses.float()).mean())
