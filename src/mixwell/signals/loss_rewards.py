"""Rewards of a bandit that draws from the domains where the loss is high."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.signals.domain_losses import LossSignal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Json, Vector


@final
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
        decay: of the running means.

    Raises:
        ValueError: the decay is not in [0, 1).

    References:
        Albalak, Pan, Raffel, Wang: Efficient online data mixing for language model pre-training (2023).
    """

    def __init__(self, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of the rewards must be in [0, 1), got {decay}")
        self.decay = float(decay)
        self._count = 0

    def __repr__(self) -> str:
        return f"LossRewards({self.decay!r})"

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        super()._attach(optimizer, probes)
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

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        tensors = {"log_rewards": self._log_rewards, "weights": self._weights}
        return {"count": self._count}, {name: torch.from_numpy(array) for name, array in tensors.items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        self._count = cast("int", values["count"])
        self._log_rewards[:] = tensors["log_rewards"].cpu().numpy()
        self._weights[:] = tensors["weights"].cpu().numpy()
