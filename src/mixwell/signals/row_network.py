"""A small network that maps features of a row to its weight, and Meta-Weight-Net, which learns one of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.checks import require_not_negative
from mixwell.signals.finite_draws import VALIDATION, FiniteDraws, Reject
from mixwell.signals.probe_derivatives import ProbeDerivatives
from mixwell.signals.probes import Probes, evaluation_mode, require_probes
from mixwell.signals.row_weighting import RowWeighting
from mixwell.typing import Gradients, Json, Vector

NETWORK = "row network"
"""The name under which skipped steps of the network are counted."""


@final
class RowNetwork:
    """A network with one hidden layer from features of a row to one number; trained by its own Adam.

    Weights and biases begin uniform in ``+-1/sqrt(inputs of the layer)``, as PyTorch's linear layers do, from
    their own random stream, the same on every device.

    Args:
        like: a tensor on the device, and of the least precision, in which to compute.
        saturating: whether the hidden layer is a tanh, else a ReLU.
        weight_decay: of Adam, added to the gradient.
        embeddings: the number of objects, such as domains, with learned embeddings.
        size: of each embedding; they begin as zeros, so that the order of the objects does not matter.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        seed: int,
        like: Tensor,
        saturating: bool,
        learning_rate: float,
        weight_decay: float = 0.0,
        embeddings: int = 0,
        size: int = 0,
    ) -> None:
        device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, fan: int) -> Tensor:
            numbers = torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1
            return (numbers / math.sqrt(fan)).to(device, dtype).requires_grad_()

        self.tensors = {
            "in.weight": drawn(hidden, inputs, fan=inputs),
            "in.bias": drawn(hidden, fan=inputs),
            "out.weight": drawn(1, hidden, fan=hidden),
            "out.bias": drawn(1, fan=hidden),
        }
        """The learned tensors, by name."""
        if embeddings:
            zeros = torch.zeros(embeddings, size, device=device, dtype=dtype)
            self.tensors["embeddings"] = zeros.requires_grad_()
        self._activation = torch.tanh if saturating else torch.relu
        learned = list(self.tensors.values())
        self._adam = torch.optim.Adam(learned, lr=learning_rate, weight_decay=weight_decay, foreach=False)
        for tensor in learned:  # Adam makes these at its first step, and a state must have them before
            self._adam.state[tensor] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of the rows' weights from features of shape ``(rows, inputs)``, shape ``(rows,)``."""
        own = self.tensors
        with torch.autocast(features.device.type, enabled=False):
            hidden = self._activation(functional.linear(features, own["in.weight"], own["in.bias"]))
            return functional.linear(hidden, own["out.weight"], own["out.bias"]).squeeze(-1)

    def descend(self, loss: Tensor, reject: Reject) -> None:
        """Take one step of Adam, unless a gradient is not finite, which is rejected."""
        learned = list(self.tensors.values())
        gradients = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
        if not all(bool(g.isfinite().all()) for g in gradients):
            reject(
                NETWORK,
                "the gradient of the network that weights the rows is not finite",
                "Look at the losses of the domains, or lower the learning rate",
            )
            return
        for tensor, gradient in zip(learned, gradients, strict=True):
            tensor.grad = gradient
        self._adam.step()
        self._adam.zero_grad()

    @property
    def nbytes(self) -> int:
        """The memory of the network and of Adam's moments."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """Return the weights, and Adam's state of each."""
        moments = {
            f"{name}.{kind}": value
            for name, tensor in self.tensors.items()
            for kind, value in self._adam.state[tensor].items()
        }
        return {name: tensor.detach() for name, tensor in self.tensors.items()} | moments

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
        for name, own in self.state().items():
            own.copy_(tensors[name])


@dataclass(eq=False, kw_only=True)
class NetworkSignal(Signal):
    """A mixin for signals that hold a :class:`RowNetwork`: its settings, memory and state."""

    hidden: int = 100
    learning_rate: float = 1e-3
    seed: int = 0
    _network: RowNetwork = field(init=False, repr=False)

    def _check_network(self) -> None:
        if self.hidden < 1 or not self.learning_rate > 0:
            raise ValueError(
                "the network needs at least 1 hidden unit and a positive learning rate; got "
                f"{self.hidden} and {self.learning_rate}"
            )

    @property
    @override
    def nbytes(self) -> int:
        return self._network.nbytes

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        values, tensors = super().state()
        return values, tensors | {f"network.{name}": t for name, t in self._network.state().items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(values, tensors)
        self._network.load_state({name.removeprefix("network."): t for name, t in tensors.items()})


@final
@dataclass(eq=False)
class LossNetwork(NetworkSignal, RowWeighting):
    """Meta-Weight-Net: ``v_i = V(l_i; Theta)``, a network of one hidden layer and a sigmoid (Shu et al. 2019).

    When a round begins, the network takes one step of Adam on the validation loss after a virtual training step on
    fresh rows of all domains (the probes'; row i counts ``mu_i = p_d / n_d``):

        ``theta'(Theta) = theta - eta sum_i mu_i f_i(Theta) grad l_i(theta)``
        ``d L_V(theta') / d Theta = -eta sum_i mu_i <grad L_V(theta'), grad l_i(theta)> d f_i / d Theta``

    with ``f = v``, or normalized as the real steps are. The inner products of all rows are one pass in forward
    mode (:mod:`mixwell.signals.probe_derivatives`), so nothing is differentiated twice. With a horizon of
    1 this is the published algorithm, except for the rows of the virtual step; with T, one such step is taken
    every T training steps. The other settings are those of :class:`NetworkSignal` and
    :class:`mixwell.signals.row_weighting.RowWeighting`.

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
        self._draws = FiniteDraws(self._probes, self._reject)
        self._derivatives = ProbeDerivatives(self._probes, self._parameters)
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
        with evaluation_mode(self._probes.model):
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
        drawn = [self._probes.batch(name) for name in self._domains]
        batches: list[Any] = []
        losses: list[Tensor] = []
        bases: list[float] = []
        gradient: Gradients = [None] * len(self._parameters)
        for name, first, base in zip(self._domains, drawn, self._base().tolist(), strict=True):
            found = self._draws.compute(name, self._row_gradient, self._finite, first=first)
            if found is None:
                continue
            batch, own, part = found
            batches.append(batch)
            losses.append(own)
            bases.append(base)
            gradient = [_plus(a, b, base / len(own)) for a, b in zip(gradient, part, strict=True)]
        if not batches:
            return
        known = torch.cat(losses)
        counts = [len(own) for own in losses]
        measure = np.repeat(np.array(bases) / np.array(counts), counts)
        rates = self._rates()
        with torch.no_grad():
            scale = float(self._scale(self._network_weights(known), measure))
            moved = [
                p.detach() if g is None else p.detach() - rate * scale * g
                for p, g, rate in zip(self._parameters.tensors, gradient, rates, strict=True)
            ]
        align = self._draws.compute(
            VALIDATION,
            lambda batch: self._derivatives.mean_gradient(batch, moved),
            lambda one: self._parameters.non_finite(one) is None,
        )
        if align is None:
            return
        direction = [None if g is None else rate * g for g, rate in zip(align, rates, strict=True)]
        products = torch.cat([self._derivatives.along(batch, direction)[1] for batch in batches])
        with torch.enable_grad():
            weights = self._network_weights(known)
            gains = products.to(weights) * torch.from_numpy(measure).to(weights)
            self._network.descend(-(gains * weights * self._scale(weights, measure)).sum(), self._reject)

    def _row_gradient(self, batch: Any) -> tuple[Any, Tensor, Gradients]:
        return batch, *self._derivatives.row_gradient(batch, self._network_weights)

    def _finite(self, found: tuple[Any, Tensor, Gradients]) -> bool:
        _, losses, gradient = found
        return bool(losses.isfinite().all()) and self._parameters.non_finite(gradient) is None

    def _rates(self) -> list[float]:
        groups = self._optimizer.param_groups
        return [float(groups[group]["lr"]) for group in self._parameters.groups]


def _plus(total: Tensor | None, part: Tensor | None, factor: float) -> Tensor | None:
    """Add gradients, some of which may be missing."""
    if part is None:
        return total
    return part * factor if total is None else total.add_(part, alpha=factor)
