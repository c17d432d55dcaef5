"""DoGE: how well a domain's gradient aligns with the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import cast, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.parameters import inner_products
from mixwell.hypergradient.traces.base import Combined, empty_trace
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Vector

# As in torch.nn.utils.clip_grad_norm_; DoGE also adds it to the mean norm.
EPSILON = 1e-6


@final
@dataclass(eq=False)
class Alignment(Signal):
    """Inner products of the domains' gradients with the target's (DoGE).

    In a step with learning rate ``eta_t`` (of the first parameter group) every domain's gradient is clipped to
    ``clip_norm`` and divided by the mean of their norms; a round sums over its steps,

        ``u_j = sum_t eta_t clip(g_j) / (mean_i |clip(g_i)| + 1e-6)``,

    and ends with ``W_j = <u_j, clip(g_target)>``, clipped to ``[0, score_cap * sum_t eta_t]``: domains that point
    away from the target count as much as those orthogonal to it. The score is ``-W_j``. A round of one step is the
    published rule; a longer one sums its steps, with one target gradient at its end for all of them.

    A domain that is absent from a step adds nothing to its own sum and is not in the mean of norms; one that is
    included with some probability counts by its inverse, after clipping. Parts of a domain's batch are summed
    before clipping. One gradient per domain is held, two where a round has several steps.

    Args:
        clip_norm: the norm to which the gradients of the domains and of the target are clipped.
        universal: whether the target is the sum of the domains' clipped gradients in the last step (universal
            generalization), so that no validation gradient is required.
        score_cap: the largest ``W_j``, in learning rates.

    References:
        Fan, Pagliardini, Jaggi, "DoGE: Domain Reweighting with Generalization Estimation" (2023),
        arXiv:2310.15393.
    """

    clip_norm: float = 5.0
    _: KW_ONLY
    universal: bool = False
    score_cap: float = 5.0

    _saved = ("_steps", "_rates", "_sums", "_target")

    def __post_init__(self) -> None:
        for name in ("clip_norm", "score_cap"):  # infinity turns either off
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        self.requirements = Requirements(validation=not self.universal)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        distributed.require_single_process(self)
        self._optimizer = optimizer
        self._sums = [self._empty() for _ in self._domains]
        self._step: list[list[Tensor]] = []  # for steps after a round's first; allocated when there is one
        self._target = self._empty() if self.universal else []
        self._scales = np.zeros(len(self._domains))
        self._steps, self._rates = 0, 0.0

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._steps, self._rates = 0, 0.0

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        self._scales[:] = 0

    @override
    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        first = not self._scales[domain]
        for buffer, gradient in zip(self._held()[domain], gradients, strict=True):
            if first:
                buffer.zero_()  # it holds an earlier step's or round's gradient
            if gradient is not None:
                buffer.add_(gradient.detach(), alpha=scale)
        self._scales[domain] += scale

    @override
    def end_step(self, combined: Combined) -> None:
        held = self._held()
        present = np.flatnonzero(self._scales).tolist()
        # This divides by the inverse of the inclusion probability: fractions sum to one.
        norms = _norms([held[j] for j in present]) / self._scales[present]
        factors = self._clip_factors(norms)
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        common = learning_rate / (float((factors * norms).mean()) + EPSILON)
        for target in self._target:
            target.zero_()
        for j, factor in zip(present, factors.tolist(), strict=True):
            for target, gradient in zip(self._target, held[j], strict=False):  # empty unless universal
                target.add_(gradient, alpha=factor)
            for total, gradient in zip(self._sums[j], held[j], strict=True):
                if total is gradient:
                    total.mul_(common * factor)
                else:
                    total.add_(gradient, alpha=common * factor)
        if self._steps == 0:
            for j in set(range(len(self._sums))) - set(present):
                for total in self._sums[j]:
                    total.zero_()
        self._steps += 1
        self._rates += learning_rate

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        if self._steps == 0:  # all steps of the round were skipped
            return np.zeros(len(self._sums))
        target, factor = cast("Gradients", self._target), 1.0
        if not self.universal:
            assert validation is not None
            target = validation
            factor = float(self._clip_factors(_norms([validation]))[0])
        aligned = factor * np.array([sum(inner_products(target, total)) for total in self._sums])
        return -np.clip(aligned, 0, self.score_cap * self._rates)

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for one in (*self._sums, *self._step, self._target) for tensor in one)

    def _empty(self) -> list[Tensor]:
        return [empty_trace(parameter) for parameter in self._parameters.tensors]

    def _held(self) -> list[list[Tensor]]:
        """Return the buffers of this step's gradients; in a round's first step those of its sums."""
        if self._steps == 0:
            return self._sums
        if not self._step:
            self._step = [self._empty() for _ in self._sums]
        return self._step

    def _clip_factors(self, norms: Vector) -> Vector:
        """Return the factors that clip gradients of these norms."""
        factors = np.minimum(1.0, self.clip_norm / (norms + EPSILON))
        # A norm that overflowed must not make its gradient zero; the mixer refuses the score.
        return np.where(np.isfinite(norms), factors, math.nan)


def _norms(vectors: Sequence[Sequence[Tensor | None]]) -> Vector:
    """Return the norms of vectors, each of several tensors, with one synchronization of the device."""
    every = [tensor for vector in vectors for tensor in vector]
    return np.sqrt(np.reshape(inner_products(every, every), (len(vectors), -1)).sum(axis=1))
