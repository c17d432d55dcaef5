"""TANDEM: a second network, trained at the same time, that also learns from the validation set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.checks import require_at_least, require_positive
from mixwell.signals.finite_draws import VALIDATION, FiniteDraws, fill_missing
from mixwell.signals.model_copy import ModelCopy
from mixwell.signals.probes import Probes, evaluation_loss, require_probes
from mixwell.typing import Gradients, Json, Vector


@final
@dataclass(kw_only=True, eq=False)
class TwinNetworks(Signal):
    r"""Whether a domain's loss falls where the model also learns from the validation set (TANDEM).

    For the last ``K`` steps of a round a twin w of the model u is trained at the same time, from the same
    parameters:

        ``u <- u - eta sum_j w_j grad l_j(u)``
        ``w <- w - eta (grad L_V(w) + gamma sum_j w_j grad l_j(w))``

    and the score of a domain is ``gamma (l_j(w_K) - l_j(u_K))``, both on the same fresh rows. u is the model in
    its ordinary training steps; w has an optimizer of the same kind, with a copy of its state, and its gradient is
    multiplied by the clipping factor of the model's gradient in that step. For plain SGD this is the published
    rule.

    A round of T steps is an episode: ``T - K`` free steps, then the K steps with a twin; with ``T < K`` all steps
    have one. Losses are compared in evaluation mode, without dropout.

    Args:
        probe_steps: K, steps with a twin before each update.
        gamma: the factor of the training loss in the twin's objective.
        learning_rate: of the twin; by default that of the model's optimizer in the same step.

    References:
        Wang et al., "TANDEM: bi-level data mixture optimization with twin networks" (2025).
    """

    probe_steps: int = 5
    gamma: float = 1.0
    learning_rate: float | None = None

    requirements = Requirements(domain_batches=False, validation=False)  # probes read the validation set
    _saved = ("_probing", "_weights")

    def __post_init__(self) -> None:
        require_at_least(1, probe_steps=self.probe_steps)
        require_positive(gamma=self.gamma, learning_rate=self.learning_rate)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(self, probes, self._parameters, self._domains, validation=True)
        self._draws = FiniteDraws(self._probes, self._reject)
        self._twin = ModelCopy(self._probes.model, optimizer)
        self._weights = np.full(len(self._domains), 1 / len(self._domains))
        self._probing = False

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights
        self._probing = False

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        if remaining <= self.probe_steps and not self._probing:
            self._twin.synchronize()
            self._probing = True

    @override
    def end_step(self, combined: Combined) -> None:
        if not self._probing:
            return
        weights = zip(self._domains, self._weights.tolist(), strict=True)
        parts = [(1.0, VALIDATION), *((self.gamma * weight, name) for name, weight in weights)]
        self._twin.step(
            self._probes, self._draws, parts, clip=combined.clip, learning_rate=self.learning_rate
        )

    @override
    def scores(self, validation: Gradients | None) -> Vector | None:
        """Return the scores; a domain without a finite batch has the mean of the others' scores."""
        if not self._probing:  # all steps with the twin were skipped
            return np.zeros(len(self._domains))
        # A twin with a loss that is not finite has diverged, which the scores show.
        losses = [
            self._draws.compute(name, self._losses, lambda found: math.isfinite(found[1]))
            for name in self._domains
        ]
        found = fill_missing([None if one is None else one[0] - one[1] for one in losses])
        return None if found is None else self.gamma * found

    def _losses(self, batch: Any) -> tuple[float, float]:
        """Return the losses of the twin and of the model."""
        probes = self._probes
        return evaluation_loss(probes, self._twin.model, batch), evaluation_loss(probes, probes.model, batch)

    @property
    @override
    def nbytes(self) -> int:
        return self._twin.nbytes

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        values, tensors = super().state()
        if self._probing:
            values["twin"], copied = self._twin.state()
            tensors |= copied
        return values, tensors

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(values, tensors)
        if self._probing:
            self._twin.load_state(cast("Json", values["twin"]), tensors)
