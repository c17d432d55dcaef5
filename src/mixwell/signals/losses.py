"""Signals that use nothing but the losses of the training steps: Group DRO, DoReMi, dynamic loading, ODM."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.checks import require_choice
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Vector

Absent = Literal["last", "zero"]
"""The number of a domain in a step without it: that of the last step with it, or zero."""
Clip = Literal["element", "domain", "none"]
Objective = Literal["losses", "excess"]


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
    def begin_step(self, *, remaining: int, interval: int) -> None:
        self._step[:] = 0

    @override
    def record_loss(
        self, domain: int, losses: Tensor, *, fraction: float, reference: Tensor | None = None
    ) -> None:
        value = self._value(domain, losses, reference)
        if value is not None:
            self._step[:, domain] += fraction * value, fraction

    @override
    def end_step(self, combined: Combined) -> None:
        sums, fractions = self._mean_over_ranks(self._step)
        self._take(np.divide(sums, fractions, out=np.full(len(sums), np.nan), where=fractions > 0))

    def _value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float | None:
        """Return the number that stands for losses, by default their mean, in float32 or better.

        Returns:
            ``None`` for losses that are left out, as if the domain had none.
        """
        return float((losses if losses.dtype == torch.float64 else losses.float()).mean())

    @abstractmethod
    def _take(self, losses: Vector) -> None:
        """Take the numbers of a step, NaN for absent domains, shape ``(m,)``."""

    def _mean_over_ranks(self, numbers: Vector) -> Vector:
        return distributed.all_reduce_sum(numbers, self._parameters.device) / distributed.world_size()

    @property
    @override
    def nbytes(self) -> int:
        return self._step.nbytes + sum(tensor.nbytes for tensor in self.state()[1].values())


class SummedLosses(LossSignal):
    """Numbers of the steps, summed over a round: the sum of T single updates while the weights are held."""

    absent: Absent
    """What a domain adds in a step without it; a field of the subclasses."""
    _saved = ("_steps", "_totals", "_last")

    def __post_init__(self) -> None:
        require_choice(Absent, absent=self.absent)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._totals, self._last = np.zeros(len(self._domains)), np.zeros(len(self._domains))
        self._steps = 0

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


@final
@dataclass(eq=False)
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

    size_adjustment: float = 0.0
    rows: Mapping[str, int] | None = None
    _: KW_ONLY
    absent: Absent = "zero"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.size_adjustment
        if not (math.isfinite(c) and c >= 0):
            raise ValueError(f"the size adjustment C must be finite and not negative, got {c}")
        wrong = {name: count for name, count in (self.rows or {}).items() if not count > 0}
        if wrong:
            raise ValueError(f"the rows of a domain must be positive, got {wrong}")
        if c and self.rows is None:
            raise ValueError(
                f"the size adjustment C = {c} needs the number of rows of every domain: rows={{...}}"
            )

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._added = np.zeros(len(self._domains))
        if self.size_adjustment:
            counts = self.rows or {}
            missing = [name for name in self._domains if name not in counts]
            if missing:
                raise ValueError(f"the size adjustment needs the rows of {', '.join(missing)}; got {counts}")
            self._added = self.size_adjustment / np.sqrt([float(counts[name]) for name in self._domains])

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        return -(self._totals + self._steps * self._added)


@final
@dataclass(eq=False)
class ExcessLosses(SummedLosses):
    """The clipped excess loss over a reference model: domains with more left to learn get more weight (DoReMi).

        ``lam_j = mean over the tokens of domain j of max(0, loss - loss of the reference)``

        ``score_j = -sum over the steps of lam_j``

    With ``UniformSmoothing(MirrorDescent(eta), c)`` and T = 1 this is DoReMi's rule. A longer round takes the T
    steps' updates in one, with the weights held.

    Args:
        clip: where the excess is clipped at zero: ``"element"``, each recorded loss (of a token, of a row, or the
            mean of a part), ``"domain"``, the mean of a domain's batch, or ``"none"``.
        absent: the excess of a domain in a step without it: its ``"last"`` one (0 at first), or ``"zero"``.
        objective: what the training step minimizes: the weighted ``"losses"``, or the weighted ``"excess"``,
            clipped at zero.

    References:
        Xie et al.: DoReMi, optimizing data mixtures speeds up language model pretraining (2023), Algorithm 1.
    """

    clip: Clip = "element"
    _: KW_ONLY
    absent: Absent = "last"
    objective: Objective = "losses"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(Clip, clip=self.clip)
        require_choice(Objective, objective=self.objective)
        self.requirements = replace(self.requirements, reference=True, objective=self.objective)

    @override
    def _value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float | None:
        assert reference is not None  # the mixer requires it
        excess = losses - reference
        if not bool(torch.isfinite(excess).all()):  # clipping would turn it into a zero
            self._reject(
                self._domains[domain],
                f"the losses of domain {self._domains[domain]!r} less those of the reference model are not finite",
                "Look at the reference model on that batch",
            )
            return None
        return super()._value(domain, excess.clamp(min=0) if self.clip == "element" else excess, None)

    @override
    def _take(self, losses: Vector) -> None:
        # Only now, when the parts of a domain's batch have come together. A NaN stays one.
        super()._take(losses.clip(min=0.0) if self.clip == "domain" else losses)


@final
@dataclass(eq=False)
class LossRewards(LossSignal):
    """Running means of ``exp(loss)``, and weights that explore less and less (ODM).

    After every step, for the domains in it, and at the end of a round, after t steps with K domains:

        ``R_i <- decay R_i + (1 - decay) exp(loss_i)``

        ``e = min(1/K, sqrt(log K / (K t)))``,   ``w_i = (1 - K e) R_i / sum_j R_j + e``

    The scores are ``-log w``, for the update :class:`mixwell.SoftmaxWeights`. In a longer round the means follow
    every step, and the weights follow the means at its end. The rewards are kept as logarithms, so that
    ``exp(loss)`` cannot overflow.

    A domain that was never seen has no reward, so its weight is e, the exploration; until ``t > K log K`` that is
    1/K. As in the authors' code the means begin at 0, so that a domain which is seen late begins low. Steps of the
    mixer's warmup are not counted.

    Args:
        decay: of the running means, in [0, 1).

    References:
        Albalak, Pan, Raffel, Wang: Efficient online data mixing for language model pre-training (2023).
    """

    decay: float = 0.9

    _saved = ("_count", "_log_rewards", "_weights")

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"the decay of the rewards must be in [0, 1), got {self.decay}")

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._count = 0
        self._log_rewards = np.full(len(self._domains), -np.inf)
        self._weights = np.full(len(self._domains), 1 / len(self._domains))

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights  # for a round in which nothing is seen

    @override
    def _take(self, losses: Vector) -> None:
        present = ~np.isnan(losses)
        faded = self._log_rewards[present] + (math.log(self.decay) if self.decay else -np.inf)
        self._log_rewards[present] = np.logaddexp(faded, math.log1p(-self.decay) + losses[present])
        self._count += 1

    @property
    def exploration(self) -> float:
        """e, the least weight after the steps so far."""
        domains = len(self._weights)
        return min(1 / domains, math.sqrt(math.log(domains) / (domains * max(self._count, 1))))

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        """Return ``-log w`` of the rewards' weights, or of the current ones where nothing was ever seen."""
        if np.isneginf(self._log_rewards).all():
            return -np.log(self._weights)
        total = np.logaddexp.reduce(self._log_rewards)
        with np.errstate(divide="ignore"):  # without exploration it is log 0
            explored = np.log(self.exploration)
            rewarded = np.log(max(0.0, 1 - len(self._weights) * self.exploration))
        return -np.logaddexp(explored, rewarded + self._log_rewards - total)

    @override
    def summary(self) -> dict[str, float]:
        return {"exploration": self.exploration}
