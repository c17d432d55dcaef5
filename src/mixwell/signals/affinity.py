"""Skill-It and Aioli: how much the target's losses fall after a copy of the model trains on one domain."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.checks import require_at_least, require_choice, require_positive
from mixwell.signals.finite_draws import VALIDATION, FiniteDraws
from mixwell.signals.model_copy import ModelCopy
from mixwell.signals.probes import Probes, evaluation_loss, modes, require_probes
from mixwell.typing import Gradients, Vector

Targets = Literal["validation", "domains"]


@dataclass(kw_only=True, eq=False)
class AffinitySignal(Signal):
    """A signal that trains a copy of the model on mixtures near one domain, at the end of a round.

    The copy starts at the model's parameters, with its optimizer's state, and takes ``probe_steps`` steps on the
    mixture ``p_i = (1 - eps) e_i + eps / m``. With F the falls of the n target losses by mixture, shape
    ``(m, n)``, and P the mixtures, the affinity A solves ``P A = F``: a law that is linear in the mixture. Losses
    before and after are measured on the same rows, in evaluation mode.

    Args:
        eta: the factor of the scores.
        targets: ``"validation"``, the loss on the validation set (n = 1), or ``"domains"``, the losses on fresh
            rows of all domains (n = m).
        probe_steps: steps of the copy on each mixture.
        sweeps: how often it is trained on each mixture; falls are averaged.
        smoothing: eps.
        chained: whether the copy continues from one mixture to the next, in an order drawn anew for each sweep, or
            starts at the model again.
        learning_rate: of the copy; by default that of the model's optimizer in the last step of the round.
    """

    eta: float = 1.0
    targets: Targets = "validation"
    probe_steps: int = 4
    sweeps: int = 1
    smoothing: float = 0.75
    chained: bool = True
    learning_rate: float | None = None
    seed: int = 0

    requirements = Requirements(domain_batches=False, validation=False)  # probes read the validation set
    _saved = ("_round", "_clip", "_modes")
    _trains = True  # whether a copy is ever trained

    def __post_init__(self) -> None:
        require_choice(Targets, targets=self.targets)
        require_at_least(1, probe_steps=self.probe_steps, sweeps=self.sweeps)
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {self.smoothing}")
        require_positive(eta=self.eta, learning_rate=self.learning_rate)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        validation = self.targets == "validation"
        self._probes = require_probes(self, probes, self._parameters, self._domains, validation=validation)
        self._draws = FiniteDraws(self._probes, self._reject)
        self._copy = ModelCopy(self._probes.model, optimizer) if self._trains else None
        self._round, self._clip = 0, 1.0
        self._modes: list[bool] | None = None

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._round = round_index

    @override
    def end_step(self, combined: Combined) -> None:
        # The loop may put the model into evaluation mode before the round ends.
        self._clip, self._modes = combined.clip, modes(self._probes.model)

    @property
    @override
    def nbytes(self) -> int:
        return 0 if self._copy is None else self._copy.nbytes

    @override
    def scores(self, validation: Gradients | None) -> Vector | None:
        """Return ``-eta`` times the subclass's sums."""
        names = (VALIDATION,) if self.targets == "validation" else self._domains
        drawn = [self._draws.batch(name) for name in names]
        found = [
            self._draws.compute(name, self._measured, lambda one: math.isfinite(one[1]), first=first)
            for name, first in zip(names, drawn, strict=True)
        ]
        if all(one is None for one in found):
            return None
        # A target without a finite batch has no part in the sums: its loss is 0 before and after.
        batches = [None if one is None else one[0] for one in found]
        sums = self._sums(batches, np.array([0.0 if one is None else one[1] for one in found]))
        return None if sums is None else -self.eta * sums

    @abstractmethod
    def _sums(self, batches: Sequence[Any], losses: Vector) -> Vector | None:
        """Return the negative scores without eta from target batches and their losses.

        Args:
            batches: ``None`` for a target that was left out.
            losses: finite, shape ``(n,)``.

        Returns:
            Shape ``(m,)``; ``None`` where a copy had a loss that is not finite.
        """

    def _measured(self, batch: Any) -> tuple[Any, float]:
        return batch, evaluation_loss(self._probes, self._probes.model, batch)

    def _losses(self, model: nn.Module, batches: Sequence[Any]) -> Vector:
        losses = [0.0 if one is None else evaluation_loss(self._probes, model, one) for one in batches]
        return np.array(losses)

    def _falls(self, batches: Sequence[Any], before: Vector) -> Vector | None:
        """Return the fall of each target by each domain: A, shape ``(m, n)``; ``None`` if it is not finite."""
        assert self._copy is not None
        m = len(self._domains)
        mixtures = (1 - self.smoothing) * np.eye(m) + self.smoothing / m
        order = np.random.default_rng([self.seed, self._round])
        falls = np.zeros((m, len(before)))
        self._copy.synchronize()
        start, turns = before, itertools.count()
        for _ in range(self.sweeps):
            for i in order.permutation(m) if self.chained else range(m):
                if not self.chained:
                    self._copy.synchronize()
                    start = before
                self._train(self._copy, mixtures[i], turns)
                after = self._losses(self._copy.model, batches)
                if not np.isfinite(after).all():
                    self._reject(
                        self._domains[i],
                        f"the loss of a copy of the model that was trained on {self._domains[i]!r} is not finite",
                        "Lower its learning_rate",
                    )
                    return None
                falls[i] += start - after
                start = after
        return np.asarray(np.linalg.solve(mixtures, falls / self.sweeps), dtype=np.float64)

    def _train(self, copy: ModelCopy, mixture: Vector, turns: Iterator[int]) -> None:
        if self._modes is not None:
            copy.set_modes(self._modes)
        parts = [(share, name) for name, share in zip(self._domains, mixture.tolist(), strict=True) if share]
        for _ in range(self.probe_steps):
            copy.step(
                self._probes,
                self._draws,
                parts,
                clip=self._clip,
                learning_rate=self.learning_rate,
                turn=next(turns),
            )


@final
@dataclass(kw_only=True, eq=False)
class SkillAffinity(AffinitySignal):
    r"""Domains that help where the target's losses are still high; the affinity is measured once (Skill-It).

    ``h_i = -eta sum_tau sum_j A_ij L_j(theta_tau)``, the sum over the ends of the last ``window`` rounds. Its
    update is :class:`mixwell.SoftmaxWeights`: ``w_i ~ exp(-h_i)``, whatever the weights were.

    ``A_ij`` is the relative fall of target loss j where a copy of the model is trained on domain i, measured at
    the end of the first round, or given. The other settings are those of :class:`AffinitySignal`.

    Args:
        window: the number of last rounds with losses in the sum.
        affinity: A, shape ``(m, n)`` with n = 1 for the validation set and n = m for the domains; ``None`` to
            measure it.

    References:
        Chen et al., "Skill-it! A data-driven skills framework for understanding and training language models"
        (2023).
    """

    eta: float = 0.2
    probe_steps: int = 50
    smoothing: float = 0.0
    chained: bool = False
    window: int = 3
    affinity: Sequence[Sequence[float]] | None = None

    _saved = (*AffinitySignal._saved, "_recent", "_matrix")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window must be at least 1 round, got {self.window}")
        self._trains = self.affinity is None

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
        self._recent: list[list[float]] = []
        self._matrix: list[list[float]] | None = None
        if self.affinity is None:
            return
        m = len(self._domains)
        n = 1 if self.targets == "validation" else m
        if len(self.affinity) != m or any(len(row) != n for row in self.affinity):
            raise ValueError(
                f"affinity must have a row for each of the {m} domains, with {n} numbers (targets: "
                f"{self.targets}); got {len(self.affinity)} rows of {sorted({len(row) for row in self.affinity})}"
            )
        if not np.isfinite(self.affinity).all():
            raise ValueError(f"affinity must be finite, got {self.affinity}")
        self._matrix = np.array(self.affinity, dtype=np.float64).tolist()

    @override
    def _sums(self, batches: Sequence[Any], losses: Vector) -> Vector | None:
        if self._matrix is None:
            falls = self._falls(batches, losses)
            if falls is None:
                return None
            with np.errstate(over="ignore"):  # a loss of 0 cannot fall
                relative = np.divide(falls, losses, out=np.zeros_like(falls), where=losses != 0)
            if not np.isfinite(relative).all():
                return relative.sum(axis=1)
            self._matrix = relative.tolist()
        self._recent = [*self._recent, losses.tolist()][-self.window :]
        return np.array(self._matrix) @ np.sum(self._recent, axis=0)


@final
@dataclass(kw_only=True, eq=False)
class OnlineAffinity(AffinitySignal):
    r"""Domains on which the target's losses fall now, measured anew at the end of every round (Aioli).

    ``h_i = -eta sum_j A'_ij`` with ``A' = A / sum A``, from which the least entry is subtracted first where it is
    negative, and A the falls of the target losses. Its update is mirror descent; with a ``memory``,
    :class:`mixwell.SoftmaxWeights` on the running mean ``A' <- (1 - memory) A'_now + memory A'``. The other
    settings are those of :class:`AffinitySignal`.

    Args:
        memory: the fraction of the former mean that stays; ``None`` for none.

    References:
        Chen, Hu, Lourie, Cho, Re, "Aioli: a unified optimization framework for language model data mixing" (2024).
    """

    memory: float | None = None

    _saved = (*AffinitySignal._saved, "_mean")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None and not 0 <= self.memory < 1:
            raise ValueError(f"memory must be in [0, 1), got {self.memory}")
        self._mean: list[list[float]] | None = None

    @override
    def _sums(self, batches: Sequence[Any], losses: Vector) -> Vector | None:
        falls = self._falls(batches, losses)
        if falls is None:
            return None
        falls = falls - min(float(falls.min()), 0.0)
        total = float(falls.sum())
        mean = falls / total if total > 0 else falls  # all falls are equal, and zero now
        if self.memory is not None:
            if self._mean is not None:
                mean = (1 - self.memory) * mean + self.memory * np.array(self._mean)
            self._mean = mean.tolist()
        return mean.sum(axis=1)
