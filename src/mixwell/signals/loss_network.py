"""A network learns from the validation set how much a row of a given loss should count."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.signals.base import Requirements
from mixwell.signals.directional import Derivatives
from mixwell.signals.probes import Probes, require_probes
from mixwell.signals.row_networks import NetworkSignal, RowNetwork
from mixwell.signals.row_weighting import RowWeighting
from mixwell.signals.settings import require_not_negative
from mixwell.typing import Gradients, Vector


@final
@dataclass(eq=False)
class LossNetwork(NetworkSignal, RowWeighting):
    """Meta-Weight-Net: ``v_i = V(l_i; Theta)``, a network of one hidden layer and a sigmoid (Shu et al. 2019).

    When a round begins, the network takes one step of Adam on the validation loss after a virtual training step on
    fresh rows of all domains (the probes'; row i counts ``mu_i = p_d / n_d``):

        ``theta'(Theta) = theta - eta sum_i mu_i f_i(Theta) grad l_i(theta)``
        ``d L_V(theta') / d Theta = -eta sum_i mu_i <grad L_V(theta'), grad l_i(theta)> d f_i / d Theta``

    with ``f = v``, or normalized as the real steps are. The inner products of all rows are one pass in forward
    mode (:class:`mixwell.signals.directional.Derivatives`), so nothing is differentiated twice. With a horizon of
    1 this is the published algorithm, except for the rows of the virtual step; with T, one such step is taken
    every T training steps. The other settings are those of :class:`NetworkSignal` and
    :class:`mixwell.signals.row_weighting.RowWeighting`.

    Args:
        weight_decay: of Adam.

    References:
        Shu, Xie, Yi, Zhao, Zhou, Xu, Meng, "Meta-Weight-Net: Learning an Explicit Mapping For Sample Weighting"
        (2019), Eq. 3 to 6.
    """

    _: KW_ONLY
    weight_decay: float = 1e-4

    # It takes validation gradients itself, where the virtual steps end.
    requirements = Requirements(domain_batches=False, mixed_batches=True, validation=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_network()
        require_not_negative(weight_decay=self.weight_decay)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(
            self, probes, self._parameters, self._domains, validation=True, row_losses=True
        )
        self._derivatives = Derivatives(self._probes, self._parameters)
        super()._attach(optimizer, probes)
        self._optimizer = optimizer
        self._network = RowNetwork(
            1,
            self.hidden,
            seed=self.seed,
            like=self._parameters.tensors[0],
            saturating=False,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
        )

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        super().begin_round(round_index, weights, validation)
        with self._derivatives.evaluating():
            self._learn()

    @override
    def _row_weights(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor:
        with torch.no_grad():
            return self._network_weights(losses)

    def _network_weights(self, losses: Tensor) -> Tensor:
        like = self._network.tensors["out.bias"]
        return self._network.logits(losses.detach().to(like).unsqueeze(1)).sigmoid()

    def _learn(self) -> None:
        """Take one step of Adam on the validation loss after a virtual step."""
        batches = [self._probes.batch(name) for name in self._domains]
        losses: list[Tensor] = []
        gradient: Gradients = [None] * len(self._parameters)
        for base, batch in zip(self._base().tolist(), batches, strict=True):
            own, part = self._derivatives.row_gradient(batch, self._network_weights)
            losses.append(own)
            gradient = [_plus(a, b, base / len(own)) for a, b in zip(gradient, part, strict=True)]
        known = torch.cat(losses)
        counts = [len(own) for own in losses]
        measure = np.repeat(self._base() / np.array(counts), counts)
        rates = self._rates()
        with torch.no_grad():
            scale = float(self._scale(self._network_weights(known), measure))
            moved = [
                p.detach() if g is None else p.detach() - rate * scale * g
                for p, g, rate in zip(self._parameters.tensors, gradient, rates, strict=True)
            ]
        align = self._derivatives.mean_gradient(self._probes.validation_batch(), moved)
        direction = [None if g is None else rate * g for g, rate in zip(align, rates, strict=True)]
        products = torch.cat([self._derivatives.along(batch, direction)[1] for batch in batches])
        with torch.enable_grad():
            weights = self._network_weights(known)
            gains = products.to(weights) * torch.from_numpy(measure).to(weights)
            self._network.descend(-(gains * weights * self._scale(weights, measure)).sum())

    def _rates(self) -> list[float]:
        groups = self._optimizer.param_groups
        return [float(groups[group]["lr"]) for group in self._parameters.groups]


def _plus(total: Tensor | None, part: Tensor | None, factor: float) -> Tensor | None:
    """Add gradients, some of which may be missing."""
    if part is None:
        return total
    return part * factor if total is None else total.add_(part, alpha=factor)
