"""TiKMiX: how much a domain's preconditioned gradient lowers the target's loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.parameters import cuda_devices, inner_products
from mixwell.hypergradient.traces.base import Combined, empty_trace
from mixwell.signals.base import Signal, scores_of_weights
from mixwell.signals.checks import require_positive
from mixwell.signals.finite_draws import FiniteDraws
from mixwell.signals.influence_mixtures import (
    annealed_mixture,
    direct_mixture,
    fit_trees,
    latin_hypercube,
    objective,
    units,
)
from mixwell.signals.probes import Probes, parameter_gradients, require_probes
from mixwell.typing import Gradients, Vector


@final
@dataclass(eq=False)
class Influence(Signal):
    """The influence of every domain on the target, and the mixture that follows from it (TiKMiX).

        ``S_j = grad f^T H^-1 g_j``,   ``H = F / mean(F) + damping``,   ``F = mean_t (sum_j w_j g_j)^2``

    with the target's gradient at the end of the round, the mean gradient ``g_j`` of domain j over the round's
    steps, and the diagonal F of the empirical Fisher matrix of the training loss, from the gradients that the
    optimizer is given. Larger is better. (F is divided by its mean: a factor of S does not matter for what
    follows.)

    Without candidates (TiKMiX-D) the next mixture minimizes ``std(Phat) - sum(Phat) - entropy(w)`` with at
    least the influence of the round's weights. With candidates (TiKMiX-M) that number of mixtures around the
    round's weights are measured, each on a fresh batch of every domain, LightGBM learns the influence of a
    mixture, and the mixture with the best prediction is searched for (:mod:`mixwell.signals.influence_mixtures`).

    The scores are ``-log`` of the mixture, for :class:`mixwell.SoftmaxWeights`. A round has one target gradient
    whatever its length; a longer one has a better mean. A domain that is absent from a round counts as the mean of
    the others. One gradient per domain and one more are held.

    Args:
        damping: added to the diagonal, which has mean 1.
        candidates: of TiKMiX-M; 0 for TiKMiX-D.
        seed: of the candidates and the search, together with the round's index.

    References:
        "TiKMiX: Take Data Influence into Dynamic Mixture for Language Model Pre-training" (2025),
        arXiv:2508.17677.
    """

    damping: float = 0.1
    _: KW_ONLY
    candidates: int = 0
    seed: int = 0

    _saved = ("_round", "_scales", "_prior", "_sums", "_fisher")

    def __post_init__(self) -> None:
        require_positive(damping=self.damping)
        if self.candidates < 0 or 0 < self.candidates < 4:
            raise ValueError(
                f"a regression needs 4 candidates or more (0 for no regression), got {self.candidates}"
            )

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        distributed.require_single_process(self)
        parameters, domains = self._parameters, self._domains
        self._probes = require_probes(self, probes, parameters, domains) if self.candidates else None
        self._draws = None if self._probes is None else FiniteDraws(self._probes, self._reject)
        self._sums = [[empty_trace(p) for p in parameters.tensors] for _ in domains]
        self._fisher = [empty_trace(p) for p in parameters.tensors]
        self._scales = np.zeros(len(domains))
        self._prior = np.full(len(domains), 1 / len(domains))
        self._round = 0
        self._last = np.zeros(0)

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        for tensors in (*self._sums, self._fisher):
            for tensor in tensors:
                tensor.zero_()
        self._scales[:] = 0
        self._prior[:] = weights
        self._round = round_index

    @override
    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        for total, gradient in zip(self._sums[domain], gradients, strict=True):
            if gradient is not None:
                total.add_(gradient.detach(), alpha=scale)
        self._scales[domain] += scale

    @property
    @override
    def can_drop_step(self) -> bool:
        return False  # gradients are added to the sums of the round at once

    @override
    def end_step(self, combined: Combined) -> None:
        for total, gradient in zip(self._fisher, combined.gradients, strict=True):
            if gradient is not None and combined.clip > 0:
                # F is that of the loss, so of the gradient before clipping.
                unclipped = gradient.detach().to(total.dtype) / combined.clip
                total.addcmul_(unclipped, unclipped)

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        assert validation is not None
        seen = self._scales > 0
        if not seen.any():  # all steps of the round were skipped
            return scores_of_weights(self._prior)
        direction = self._natural(validation)
        sums = np.array([sum(inner_products(direction, total)) for total in self._sums])
        means = np.divide(sums, self._scales, out=np.zeros_like(sums), where=seen)
        self._last = np.where(seen, means, means[seen].mean())
        if not np.isfinite(self._last).all():
            return self._last
        if not self.candidates:
            return scores_of_weights(direct_mixture(self._last[None], self._prior))
        random = np.random.default_rng([self.seed, self._round])
        mixtures = latin_hypercube(self._prior, self.candidates, random)
        measured = self._measured(mixtures, direction)
        predict = fit_trees(mixtures, measured[:, None], seed=self.seed)
        # D's objective divides by the same units, so that both balance influence and entropy alike.
        divisors = units(self._last[None])
        mixture = annealed_mixture(
            lambda points: objective(predict(points) / divisors, points), self._prior, random
        )
        return scores_of_weights(mixture)

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in (*self._sums, self._fisher) for tensor in tensors)

    @override
    def summary(self) -> dict[str, float]:
        if not len(self._last) or not np.isfinite(self._last).all():
            return {}
        return {
            "influence": float(self._last @ self._prior),
            "influence_most": float(self._last.max()),
        }

    def _natural(self, validation: Gradients) -> Gradients:
        """Return ``H^-1 grad f``."""
        mean = sum(float(part.double().sum()) for part in self._fisher) / self._parameters.numel
        # Where the domains cancel out, or nothing has a gradient, the curvature is unknown.
        unit = mean if mean > 0 else 1.0
        return [
            None if gradient is None else gradient.detach().to(part.dtype) / (part / unit + self.damping)
            for gradient, part in zip(validation, self._fisher, strict=True)
        ]

    def _measured(self, mixtures: NDArray[np.float64], direction: Gradients) -> Vector:
        """Return the influence of mixtures, each on fresh batches.

        A domain without a finite batch counts by its influence over the round.
        """
        draws, known = self._draws, self._last.tolist()
        assert draws is not None
        found = np.zeros(len(mixtures))
        with (
            # Dropout must not disturb the run's random stream.
            torch.random.fork_rng(cuda_devices(self._parameters.tensors)),
            torch.enable_grad(),
            self._parameters.buffers_kept(),
        ):
            for place, mixture in enumerate(mixtures):
                for j, weight in enumerate(mixture.tolist()):
                    one = draws.compute(
                        self._domains[j], lambda batch: self._on(batch, direction), math.isfinite
                    )
                    found[place] += weight * (known[j] if one is None else one)
        return found

    def _on(self, batch: Any, direction: Gradients) -> float:
        """Return the influence of a batch."""
        assert self._probes is not None
        loss = self._probes.loss(self._probes.model, batch)
        return sum(inner_products(direction, parameter_gradients(self._parameters, loss)))
