"""MentorNet: rows count by their losses relative to those of the run so far, by a given or learned curriculum."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import Labels, RowGroups
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements
from mixwell.signals.checks import require_at_least, require_choice
from mixwell.signals.finite_draws import FiniteDraws
from mixwell.signals.probe_derivatives import ProbeDerivatives
from mixwell.signals.probes import Probes, evaluation_mode, require_probes
from mixwell.signals.row_network import NetworkSignal, RowNetwork
from mixwell.signals.row_weighting import RowWeighting
from mixwell.typing import Gradients, Vector

Curriculum = Literal["self-paced", "linear"]
EMBEDDING = 2
"""Size of a domain's embedding (the paper's embedding of a label)."""
TIMES = 5
"""Features of the run's progress (the paper's embedding of the epoch)."""


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
    """

    _: KW_ONLY
    steps: int
    percentile: float = 0.7
    decay: float = 0.9
    burn_in: float = 0.2

    _saved = (*RowWeighting._saved, "_average", "_seen", "_before", "_length")

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
        """Return ``v_i`` after the burn-in, with ``pace`` the current lambda."""

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        super().begin_round(round_index, weights, validation)
        self._before, self._length = self._before + self._length, 0

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        super().begin_step(remaining=remaining, interval=interval)
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
        require_choice(Curriculum, curriculum=self.curriculum)

    @override
    def _curriculum(self, losses: Tensor, pace: float, groups: RowGroups) -> Tensor:
        if self.curriculum == "self-paced" or pace <= 0:
            below = (losses <= pace).to(losses)
            return torch.where(losses.isnan(), losses, below)  # NaN compares as false, and must not vanish
        return (1 - losses / pace).clamp(0, 1)


@final
@dataclass(eq=False)
class LearnedRowCurriculum(NetworkSignal, RowCurriculum):
    """MentorNet with a data-driven curriculum, learned while the model trains (after Jiang et al. 2018).

    ``v_i = sigmoid(net(l_i, l_i - lambda, domain, time))``. When a round ends, the network takes some steps of
    Adam on fresh rows of all domains (the probes'), towards the rows that help the validation set:

        ``cross-entropy of v_i and 1[<grad L_V(theta), grad l_i(theta)> > 0]``, row i by ``mu_i = p_d / n_d``

    The inner products of all rows are one pass in forward mode (:mod:`mixwell.signals.probe_derivatives`).

    In the burn-in the network learns already. The other settings are those of :class:`RowCurriculum`,
    :class:`NetworkSignal` and :class:`mixwell.signals.row_weighting.RowWeighting`.

    Args:
        network_steps: steps of Adam when a round ends; their cost is negligible.

    References:
        Jiang, Zhou, Leung, Li, Fei-Fei, "MentorNet: Learning Data-Driven Curriculum for Very Deep Neural Networks
        on Corrupted Labels" (2018).
    """

    _: KW_ONLY
    hidden: int = 20
    network_steps: int = 50

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_network()
        require_at_least(1, network_steps=self.network_steps)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(self, probes, self._parameters, self._domains, row_losses=True)
        self._draws = FiniteDraws(self._probes, self._reject)
        self._derivatives = ProbeDerivatives(self._probes, self._parameters)
        super()._attach(optimizer, probes)
        self._network = RowNetwork(
            2 + EMBEDDING + TIMES,
            self.hidden,
            seed=self.seed,
            like=self._parameters.tensors[0],
            saturating=True,
            learning_rate=self.learning_rate,
            embeddings=len(self._domains),
            size=EMBEDDING,
        )

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        assert validation is not None
        with evaluation_mode(self._probes.model):
            self._learn(validation)
        return super().scores(validation)

    @override
    def _curriculum(self, losses: Tensor, pace: float, groups: RowGroups) -> Tensor:
        return self._logits(losses, pace, groups.labels, self._done()).sigmoid()

    def _learn(self, validation: Gradients) -> None:
        if not self._seen:
            return  # all steps of the round were skipped, so there is no moving average yet
        found = [
            self._draws.compute(name, lambda batch: self._derivatives.along(batch, validation), _all_finite)
            for name in self._domains
        ]
        known = [one for one in found if one is not None]
        if not known:
            return
        losses, products = (torch.cat(parts) for parts in zip(*known, strict=True))
        counts = np.array([0 if one is None else len(one[0]) for one in found])
        measure = torch.from_numpy(np.repeat(self._base() / np.maximum(counts, 1), counts))
        labels = np.repeat(np.arange(len(counts)), counts)
        pace, ended = self._pace(self._average, self._seen), self._before + self._length
        for _ in range(self.network_steps):
            with torch.enable_grad():
                logits = self._logits(losses, pace, labels, min(ended / self.steps, 1.0))
                wanted = (products > 0).to(logits)
                each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
                self._network.descend((each * measure.to(each)).sum(), self._reject)

    def _logits(self, losses: Tensor, pace: float, labels: Labels, done: float) -> Tensor:
        own = self._network.tensors["embeddings"]
        losses = losses.to(own)
        # Smooth in time, so that the network carries over from one step to the next.
        times = own.new_tensor([math.cos(math.pi * k * done) for k in range(1, TIMES + 1)])
        parts = [
            torch.stack([losses, losses - pace], dim=1),
            own[torch.from_numpy(labels).to(own.device)],
            times.expand(len(losses), -1),
        ]
        return self._network.logits(torch.cat(parts, dim=1))


def _all_finite(found: tuple[Tensor, Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in found)


def _percentile(losses: Vector, measure: Vector, share: float) -> float:
    """Return the least loss that at least this share of the rows, by their measure, does not exceed."""
    order = np.argsort(losses, kind="stable")
    reached = np.cumsum(measure[order]) / measure.sum()
    # Sums of equal parts fall short of the share by rounding.
    return float(losses[order[min(int(np.searchsorted(reached, share - 1e-9)), len(losses) - 1)]])
