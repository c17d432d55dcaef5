"""A network learns from the validation set how much a row of a given loss should count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.signals.directional import Derivatives
from mixwell.signals.probes import Probes
from mixwell.signals.row_networks import RowNetwork
from mixwell.signals.row_weighting import Level, RowWeighting, expect_probes
from mixwell.typing import Gradients, Json, Vector


@final
class LossNetwork(RowWeighting):
    """Meta-Weight-Net: ``v_i = V(l_i; Theta)``, a network of one hidden layer and a sigmoid (Shu et al. 2019).

    When a round begins, the network takes one step of Adam on the validation loss after a virtual training step on
    fresh rows of all domains (the probes'; row i counts ``mu_i = p_d / n_d``):

        ``theta'(Theta) = theta - eta sum_i mu_i f_i(Theta) grad l_i(theta)``
        ``d L_V(theta') / d Theta = -eta sum_i mu_i <grad L_V(theta'), grad l_i(theta)> d f_i / d Theta``

    with ``f = v``, or normalized as the real steps are. The inner products of all rows are one pass in forward
    mode (:class:`mixwell.signals.directional.Derivatives`), so nothing is differentiated twice. With a
    horizon of 1 this
    is the published algorithm, but for the rows of the virtual step; with T, one such step is taken every T
    training steps.

    Args:
        level: ``"rows"``: weigh every row; ``"domains"``: give each domain the sum over its rows as its weight
            (:class:`mixwell.signals.row_weighting.RowWeighting` says how).
        normalize: divide the weights of a batch by their mean, so that a step is as long as without them.
        hidden: width of the hidden layer.
        learning_rate: of Adam.
        weight_decay: of Adam.
        seed: of the network's first weights.

    Raises:
        ValueError: there is no such level, or a number is out of range.

    References:
        Shu, Xie, Yi, Zhao, Zhou, Xu, Meng, "Meta-Weight-Net: Learning an Explicit Mapping For Sample Weighting"
        (2019), Eq. 3 to 6.
    """

    def __init__(
        self,
        level: Level = "rows",
        *,
        normalize: bool = False,
        hidden: int = 100,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        seed: int = 0,
    ) -> None:
        super().__init__(level, normalize=normalize)
        if hidden < 1 or not learning_rate > 0 or weight_decay < 0:
            raise ValueError(
                "the network needs at least 1 hidden unit, a positive learning rate and a weight decay that is "
                f"not negative; got {hidden}, {learning_rate} and {weight_decay}"
            )
        self.hidden, self.seed = int(hidden), int(seed)
        self.learning_rate, self.weight_decay = float(learning_rate), float(weight_decay)

    def __repr__(self) -> str:
        return (
            f"LossNetwork({self.level!r}, normalize={self.normalize}, hidden={self.hidden}, "
            f"learning_rate={self.learning_rate!r}, weight_decay={self.weight_decay!r}, seed={self.seed})"
        )

    @property
    def needs_validation(self) -> bool:
        """It takes validation gradients itself, where the virtual steps end."""
        return False

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Make the network.

        Args:
            optimizer: whose learning rates the virtual steps take.
            parameters: what is trained.
            domains: their names.
            probes: with the losses of rows and a validation set.

        Raises:
            ValueError: probes are missing, or it is in use by another mixer.
        """
        self._probes = expect_probes(self, probes, validation=True)
        self._probes.expect(domains, self)
        self._derivatives = Derivatives(self._probes, parameters)
        super().attach(optimizer, parameters, domains, probes)
        self._optimizer = optimizer
        first = parameters.tensors[0]
        self._network = RowNetwork(
            1,
            self.hidden,
            seed=self.seed,
            device=first.device,
            dtype=torch.promote_types(first.dtype, torch.float32),
            saturating=False,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
        )

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """The network learns from one virtual step.

        Args:
            round_index: its number.
            weights: of the domains, shape ``(m,)``.
            validation: not used.
        """
        super().begin_round(round_index, weights, validation)
        with self._derivatives.evaluating():
            self._learn()

    def _row_weights(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor:
        with torch.no_grad():
            return self._weigh(losses)

    def _weigh(self, losses: Tensor) -> Tensor:
        like = self._network.tensors["out.bias"]
        return self._network.logits(losses.detach().to(like).unsqueeze(1)).sigmoid()

    def _learn(self) -> None:
        """One step of Adam on the validation loss after a virtual step."""
        batches = [self._probes.batch(name) for name in self._domains]
        losses: list[Tensor] = []
        gradient: Gradients = [None] * len(self._parameters)
        for base, batch in zip(self._base().tolist(), batches, strict=True):
            own, part = self._derivatives.row_gradient(batch, self._weigh)
            losses.append(own)
            gradient = [_plus(a, b, base / len(own)) for a, b in zip(gradient, part, strict=True)]
        known = torch.cat(losses)
        counts = [len(own) for own in losses]
        measure = np.repeat(self._base() / np.array(counts), counts)
        rates = self._rates()
        with torch.no_grad():
            scale = float(self._scale(self._weigh(known), measure))
            moved = [
                p.detach() if g is None else p.detach() - rate * scale * g
                for p, g, rate in zip(self._parameters.tensors, gradient, rates, strict=True)
            ]
        align = self._derivatives.mean_gradient(self._probes.validation_batch(), moved)
        direction = [None if g is None else rate * g for g, rate in zip(align, rates, strict=True)]
        products = torch.cat([self._derivatives.along(batch, direction)[1] for batch in batches])
        with torch.enable_grad():
            weights = self._weigh(known)
            gains = products.to(weights) * torch.from_numpy(measure).to(weights)
            self._network.descend(-(gains * weights * self._scale(weights, measure)).sum())

    def _rates(self) -> list[float]:
        groups = self._optimizer.param_groups
        return [float(groups[group]["lr"]) for group in self._parameters.groups]

    @property
    def nbytes(self) -> int:
        """The memory of the network."""
        return self._network.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What was added up, and the network."""
        values, tensors = super().state()
        return values, tensors | {f"network.{name}": t for name, t in self._network.state().items()}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
        super().load_state(values, tensors)
        self._network.load_state({name.removeprefix("network."): t for name, t in tensors.items()})


def _plus(total: Tensor | None, part: Tensor | None, factor: float) -> Tensor | None:
    """A sum of gradients, of which some are missing."""
    if part is None:
        return total
    return part * factor if total is None else total.add_(part, alpha=factor)
