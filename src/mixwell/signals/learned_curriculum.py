"""A network learns from the validation set which rows help."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import Labels, RowGroups
from mixwell.signals.directional import Derivatives
from mixwell.signals.probes import Probes, require_probes
from mixwell.signals.row_curriculum import RowCurriculum
from mixwell.signals.row_networks import NetworkSignal, RowNetwork
from mixwell.typing import Gradients, Vector

EMBEDDING = 2
"""Size of a domain's embedding (the paper's embedding of a label)."""
TIMES = 5
"""Features of the run's progress (the paper's embedding of the epoch)."""


@final
@dataclass(eq=False)
class LearnedRowCurriculum(NetworkSignal, RowCurriculum):
    """MentorNet with a data-driven curriculum, learned while the model trains (after Jiang et al. 2018).

    ``v_i = sigmoid(net(l_i, l_i - lambda, domain, time))``. When a round ends, the network takes some steps of
    Adam on fresh rows of all domains (the probes'), towards the rows that help the validation set:

        ``cross-entropy of v_i and 1[<grad L_V(theta), grad l_i(theta)> > 0]``, row i by ``mu_i = p_d / n_d``

    The inner products of all rows are one pass in forward mode (:class:`mixwell.signals.directional.Derivatives`).

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
        if self.network_steps < 1:
            raise ValueError(f"network_steps must be at least 1, got {self.network_steps}")

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(self, probes, self._parameters, self._domains, row_losses=True)
        self._derivatives = Derivatives(self._probes, self._parameters)
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
        with self._derivatives.evaluating():
            self._learn(validation)
        return super().scores(validation)

    @override
    def _curriculum(self, losses: Tensor, pace: float, groups: RowGroups) -> Tensor:
        return self._logits(losses, pace, groups.labels, self._done()).sigmoid()

    def _learn(self, validation: Gradients) -> None:
        if not self._seen:
            return  # all steps of the round were skipped, so there is no moving average yet
        found = [self._derivatives.along(self._probes.batch(name), validation) for name in self._domains]
        losses, products = (torch.cat(parts) for parts in zip(*found, strict=True))
        counts = [len(own) for own, _ in found]
        measure = torch.from_numpy(np.repeat(self._base() / np.array(counts), counts))
        if not bool(products.isfinite().all()):
            raise FloatingPointError(
                "the derivatives of rows along the validation gradient are not finite: look at the losses of the "
                "domains, or lower the learning rate"
            )
        labels = np.repeat(np.arange(len(counts)), counts)
        pace, ended = self._pace(self._average, self._seen), self._before + self._length
        for _ in range(self.network_steps):
            with torch.enable_grad():
                logits = self._logits(losses, pace, labels, min(ended / self.steps, 1.0))
                wanted = (products > 0).to(logits)
                each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
                self._network.descend((each * measure.to(each)).sum())

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
