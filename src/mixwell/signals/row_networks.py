"""A small network that maps features of a row to its weight, and signals that hold one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from mixwell.signals.base import Signal
from mixwell.typing import Json


@final
class RowNetwork:
    """A network with one hidden layer from features of a row to one number; trained by its own Adam.

    Weights and biases begin uniform in ``+-1/sqrt(inputs of the layer)``, as PyTorch's linear layers do, from
    their own random stream, the same on every device.

    Args:
        inputs: the number of features.
        hidden: width of the hidden layer.
        seed: of the initial weights.
        like: a tensor on the device, and of the least precision, in which to compute.
        saturating: whether the hidden layer is a tanh, else a ReLU.
        learning_rate: of Adam.
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

    def descend(self, loss: Tensor) -> None:
        """Take one step of Adam.

        Raises:
            FloatingPointError: a gradient is not finite; nothing was changed.
        """
        learned = list(self.tensors.values())
        gradients = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
        if not all(bool(g.isfinite().all()) for g in gradients):
            raise FloatingPointError(
                "the gradient of the network that weights the rows is not finite: look at the losses of the "
                "domains, or lower the learning rate"
            )
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
    """A mixin for signals that hold a :class:`RowNetwork`: its settings, memory and state.

    Args:
        hidden: width of the hidden layer.
        learning_rate: of Adam.
        seed: of the network's initial weights.
    """

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
