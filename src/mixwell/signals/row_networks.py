"""A small network that says a row's weight, and how it learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor
from torch.nn import functional


@final
class RowNetwork:
    """One hidden layer, from a few numbers about a row to one; trained by Adam on its own.

    Weights and biases begin uniform in ``+-1/sqrt(inputs of the layer)``, as PyTorch's linear layers do, from a
    random stream of their own, the same on every device.

    Args:
        inputs: numbers about a row.
        hidden: width of the hidden layer.
        seed: of the first weights.
        device: where it computes.
        dtype: in which precision.
        saturating: whether the hidden layer is a tanh, else a ReLU.
        learning_rate: of Adam.
        weight_decay: of Adam, added to the gradient.
        embeddings: how many things have numbers of their own that are learned, such as domains.
        size: how many numbers each; they begin as zeros, so that the order of the things does not matter.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        saturating: bool,
        learning_rate: float,
        weight_decay: float,
        embeddings: int = 0,
        size: int = 0,
    ) -> None:
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
        """What it learns, by name."""
        if embeddings:
            zeros = torch.zeros(embeddings, size, device=device, dtype=dtype)
            self.tensors["embeddings"] = zeros.requires_grad_()
        self._activation = torch.tanh if saturating else torch.relu
        learned = list(self.tensors.values())
        self._adam = torch.optim.Adam(learned, lr=learning_rate, weight_decay=weight_decay, foreach=False)
        for tensor in learned:  # Adam would make these at its first step, and a state must have them before
            self._adam.state[tensor] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def logits(self, features: Tensor) -> Tensor:
        """What the network says of rows; its sigmoid is their weight.

        Args:
            features: shape ``(rows, inputs)``.

        Returns:
            Shape ``(rows,)``.
        """
        own = self.tensors
        with torch.autocast(features.device.type, enabled=False):
            hidden = self._activation(functional.linear(features, own["in.weight"], own["in.bias"]))
            return functional.linear(hidden, own["out.weight"], own["out.bias"]).squeeze(-1)

    def descend(self, loss: Tensor) -> None:
        """One step of Adam.

        Args:
            loss: of what it learns, with its graph.

        Raises:
            FloatingPointError: a gradient is not finite; nothing was changed.
        """
        learned = list(self.tensors.values())
        gradients = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
        if not all(bool(g.isfinite().all()) for g in gradients):
            raise FloatingPointError(
                "the gradient of the network that weighs the rows is not finite: look at the losses of the "
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
        """Weights, and what Adam remembers of each."""
        moments = {
            f"{name}.{kind}": value
            for name, tensor in self.tensors.items()
            for kind, value in self._adam.state[tensor].items()
        }
        return {name: tensor.detach() for name, tensor in self.tensors.items()} | moments

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            tensors: its tensors.
        """
        for name, own in self.state().items():
            own.copy_(tensors[name])
