"""How much the target's losses fall where a copy of the model is trained on one domain for a few steps."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast, final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.signals.twin_networks import Twin, expected_probes, measured, modes
from mixwell.typing import Gradients, Json, Vector

Targets = Literal["validation", "domains"]


class AffinitySignal(Signal):
    """A signal that trains a copy of the model on mixtures near one domain, at the end of a round.

    The copy starts at the model's parameters, with its optimizer's state, and takes ``probe_steps`` steps on the
    mixture ``p_i = (1 - eps) e_i + eps / m``. With F the falls of the n target losses by mixture, shape
    ``(m, n)``, and P the mixtures, the affinity A solves ``P A = F``: a law that is linear in the mixture. Losses
    before and after are of the same rows, in evaluation mode.

    Args:
        targets: ``"validation"``, the loss on the validation set (n = 1), or ``"domains"``, the losses on fresh
            rows of all domains (n = m).
        probe_steps: of the copy on each mixture.
        sweeps: how often it is done for each domain; falls are averaged.
        smoothing: eps.
        chained: whether the copy goes on from one mixture to the next, in an order drawn anew for each sweep, or
            starts at the model again.
        learning_rate: of the copy; by default what the model's optimizer has in the last step of the round.
        seed: of the orders.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        targets: Targets,
        probe_steps: int,
        sweeps: int,
        smoothing: float,
        chained: bool,
        learning_rate: float | None,
        seed: int,
    ) -> None:
        if targets not in get_args(Targets):
            raise ValueError(f"targets must be 'validation' or 'domains', got {targets!r}")
        for name, count in (("probe_steps", probe_steps), ("sweeps", sweeps)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
        if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"learning_rate must be positive and finite, got {learning_rate}")
        self.targets: Targets = targets
        self.probe_steps, self.sweeps = int(probe_steps), int(sweeps)
        self.smoothing, self.chained = float(smoothing), chained
        self.learning_rate, self.seed = learning_rate, int(seed)
        self._attached = False

    def _settings(self) -> str:
        return (
            f"targets={self.targets!r}, probe_steps={self.probe_steps}, sweeps={self.sweeps}, "
            f"smoothing={self.smoothing!r}, chained={self.chained}, learning_rate={self.learning_rate!r}, "
            f"seed={self.seed}"
        )

    @property
    def supports_mixed_batches(self) -> bool:
        """Training itself is not looked at."""
        return True

    @property
    def needs_validation(self) -> bool:
        """The validation set is read through probes."""
        return False

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Take the memory of the copy.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: where rows and losses come from.

        Raises:
            ValueError: it is in use by another mixer.
        """
        if self._attached:
            raise ValueError(
                f"this {type(self).__name__} is in use by another mixer; make a new one for each"
            )
        needed = self.targets == "validation"
        self._probes = expected_probes(self, probes, parameters, domains, validation=needed)
        self._domains = tuple(domains)
        self._copy = Twin(self._probes.model, optimizer) if self._trains else None
        self._round, self._clip = 0, 1.0
        self._modes: list[bool] | None = None
        self._attached = True

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Remember which round it is.

        Args:
            round_index: its number.
            weights: not used.
            validation: not used.
        """
        self._round = round_index

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing.

        Args:
            row_groups: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(CaptureContext())

    def end_step(self, combined: Combined) -> None:
        """Remember how the model is trained, since the loop may evaluate it before the round ends.

        Args:
            combined: what the optimizer is about to be given.
        """
        self._clip, self._modes = combined.clip, modes(self._probes.model)

    @property
    def nbytes(self) -> int:
        """The memory of the copy and of its optimizer."""
        return 0 if self._copy is None else self._copy.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The round, and how the model is trained."""
        return {"round": self._round, "clip": self._clip, "modes": self._modes}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: plain values.
            tensors: none.
        """
        self._round, self._clip = int(cast("int", values["round"])), float(cast("float", values["clip"]))
        self._modes = cast("list[bool] | None", values["modes"])

    @property
    @abstractmethod
    def _trains(self) -> bool:
        """Whether a copy is ever trained."""

    @property
    def _targets(self) -> int:
        return 1 if self.targets == "validation" else len(self._domains)

    def _target_batches(self) -> list[Any]:
        if self.targets == "validation":
            return [self._probes.validation_batch()]
        return [self._probes.batch(name) for name in self._domains]

    def _losses(self, model: torch.nn.Module, batches: Sequence[Any]) -> Vector:
        return np.array([measured(self._probes, model, batch) for batch in batches])

    def _falls(self, batches: Sequence[Any], before: Vector) -> Vector:
        """The fall of each target by each domain: A, shape ``(m, n)``."""
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
                with np.errstate(invalid="ignore"):  # a difference of infinite losses is told as NaN
                    falls[i] += start - after
                start = after
        return np.asarray(np.linalg.solve(mixtures, falls / self.sweeps), dtype=np.float64)

    def _train(self, copy: Twin, mixture: Vector, turns: Iterator[int]) -> None:
        if self._modes is not None:
            copy.set_modes(self._modes)
        used = [(name, share) for name, share in zip(self._domains, mixture.tolist(), strict=True) if share]
        for _ in range(self.probe_steps):
            losses = [(share, self._probes.batch(name)) for name, share in used]
            copy.step(
                self._probes, losses, clip=self._clip, learning_rate=self.learning_rate, turn=next(turns)
            )


@final
class SkillAffinity(AffinitySignal):
    r"""Domains that help where the target's losses are still high; what helps what is measured once (Skill-It).

    ``h_i = -eta sum_tau sum_j A_ij L_j(theta_tau)``, the sum over the ends of the last ``window`` rounds. Its
    update is :class:`mixwell.SoftmaxWeights`: ``w_i ~ exp(-h_i)``, whatever the weights were.

    ``A_ij`` is the relative fall of target loss j where a copy of the model is trained on domain i
    (:class:`AffinitySignal`), measured at the end of the first round, or given.

    Args:
        eta: strength.
        window: rounds whose losses are summed.
        affinity: A, shape ``(m, n)`` with n = 1 for the validation set and n = m for the domains; ``None`` to
            measure it.
        targets: ``"validation"`` or ``"domains"``.
        probe_steps: of the copy on each domain.
        sweeps: how often it is done.
        smoothing: eps.
        chained: whether the copy goes on from one domain to the next.
        learning_rate: of the copy.
        seed: of the orders.

    Raises:
        ValueError: a setting is out of range.

    References:
        Chen et al., "Skill-it! A data-driven skills framework for understanding and training language models"
        (2023).
    """

    def __init__(
        self,
        *,
        eta: float = 0.2,
        window: int = 3,
        affinity: Sequence[Sequence[float]] | None = None,
        targets: Targets = "validation",
        probe_steps: int = 50,
        sweeps: int = 1,
        smoothing: float = 0.0,
        chained: bool = False,
        learning_rate: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            targets=targets,
            probe_steps=probe_steps,
            sweeps=sweeps,
            smoothing=smoothing,
            chained=chained,
            learning_rate=learning_rate,
            seed=seed,
        )
        if window < 1:
            raise ValueError(f"window must be at least 1 round, got {window}")
        self.eta, self.window = _positive("eta", eta), int(window)
        self.affinity = None if affinity is None else [[float(one) for one in row] for row in affinity]

    def __repr__(self) -> str:
        own = f"eta={self.eta!r}, window={self.window}, affinity={self.affinity}"
        return f"SkillAffinity({own}, {self._settings()})"

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Check the affinity that was given, or take the memory of a copy.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: where rows and losses come from.

        Raises:
            ValueError: the affinity has another shape, or is not finite.
        """
        super().attach(optimizer, parameters, domains, probes)
        self._recent: list[list[float]] = []
        self._matrix: Vector | None = None
        if self.affinity is None:
            return
        shape = (len(domains), self._targets)
        if len(self.affinity) != shape[0] or any(len(row) != shape[1] for row in self.affinity):
            raise ValueError(
                f"affinity must have a row for each of the {shape[0]} domains, with {shape[1]} numbers (targets: "
                f"{self.targets}); got {len(self.affinity)} rows of {sorted({len(row) for row in self.affinity})}"
            )
        self._matrix = np.array(self.affinity)
        if not np.isfinite(self._matrix).all():
            raise ValueError(f"affinity must be finite, got {self.affinity}")

    @property
    def _trains(self) -> bool:
        return self.affinity is None

    def scores(self, validation: Gradients | None) -> Vector:
        """``h_i = -eta sum_tau sum_j A_ij L_j(theta_tau)``.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``; NaN where a loss is not finite, which is then not kept.
        """
        batches = self._target_batches()
        losses = self._losses(self._probes.model, batches)
        if self._matrix is None:
            with np.errstate(divide="ignore", invalid="ignore"):
                found = self._falls(batches, losses) / losses
            if not np.isfinite(found).all():
                return np.full(len(self._domains), np.nan)
            self._matrix = found
        if not np.isfinite(losses).all():
            return np.full(len(self._domains), np.nan)
        self._recent = [*self._recent, losses.tolist()][-self.window :]
        return -self.eta * (self._matrix @ np.sum(self._recent, axis=0))

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The affinity that was measured, and the losses of the last rounds."""
        values, tensors = super().state()
        matrix = None if self._matrix is None else self._matrix.tolist()
        return {**values, "affinity": matrix, "recent": self._recent}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: plain values.
            tensors: none.
        """
        super().load_state(values, tensors)
        self._matrix = None if values["affinity"] is None else np.array(values["affinity"])
        self._recent = cast("list[list[float]]", values["recent"])


@final
class OnlineAffinity(AffinitySignal):
    r"""Domains on which the target's losses fall now, measured anew at the end of every round (Aioli).

    ``h_i = -eta sum_j A'_ij`` with ``A' = A / sum A``, from which the least entry is subtracted first where it is
    negative, and A the falls of the target losses (:class:`AffinitySignal`). Its update is mirror descent; with a
    ``memory``, :class:`mixwell.SoftmaxWeights` on the running mean ``A' <- (1 - memory) A'_now + memory A'``.

    Args:
        eta: multiplies the scores, for an update that has no step size.
        memory: the share of the former mean that stays; ``None`` for none.
        targets: ``"validation"`` or ``"domains"``.
        probe_steps: of the copy on each mixture.
        sweeps: how often it is done.
        smoothing: eps.
        chained: whether the copy goes on from one mixture to the next.
        learning_rate: of the copy.
        seed: of the orders.

    Raises:
        ValueError: a setting is out of range.

    References:
        Chen, Hu, Lourie, Cho, Re, "Aioli: a unified optimization framework for language model data mixing" (2024).
    """

    def __init__(
        self,
        *,
        eta: float = 1.0,
        memory: float | None = None,
        targets: Targets = "validation",
        probe_steps: int = 4,
        sweeps: int = 1,
        smoothing: float = 0.75,
        chained: bool = True,
        learning_rate: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            targets=targets,
            probe_steps=probe_steps,
            sweeps=sweeps,
            smoothing=smoothing,
            chained=chained,
            learning_rate=learning_rate,
            seed=seed,
        )
        if memory is not None and not 0 <= memory < 1:
            raise ValueError(f"memory must be in [0, 1), got {memory}")
        self.eta, self.memory = _positive("eta", eta), memory
        self._mean: Vector | None = None

    def __repr__(self) -> str:
        return f"OnlineAffinity(eta={self.eta!r}, memory={self.memory!r}, {self._settings()})"

    @property
    def _trains(self) -> bool:
        return True

    def scores(self, validation: Gradients | None) -> Vector:
        """``h_i = -eta sum_j A'_ij``.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``; NaN where a loss is not finite, which is then not kept.
        """
        batches = self._target_batches()
        found = self._falls(batches, self._losses(self._probes.model, batches))
        if not np.isfinite(found).all():
            return np.full(len(self._domains), np.nan)
        found = found - min(float(found.min()), 0.0)
        total = float(found.sum())
        mean = found / total if total > 0 else found  # all falls the same: nothing to choose by
        if self.memory is not None:
            if self._mean is not None:
                mean = (1 - self.memory) * mean + self.memory * self._mean
            self._mean = mean
        return -self.eta * mean.sum(axis=1)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The running mean."""
        values, tensors = super().state()
        return {**values, "mean": None if self._mean is None else self._mean.tolist()}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: plain values.
            tensors: none.
        """
        super().load_state(values, tensors)
        self._mean = None if values["mean"] is None else np.array(values["mean"])


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)
