"""A copy of a model with a copy of its optimizer, which Skill-It, Aioli and TANDEM train on other rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell.hypergradient.parameters import cuda_devices
from mixwell.signals.probes import Probes, modes
from mixwell.typing import Json


@final
class ModelCopy:
    """A copy of a model with a copy of its optimizer, to be trained on other rows."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._original, self._original_optimizer = model, optimizer
        # Copied together, so that the copied optimizer trains the copied parameters.
        self.model, self._optimizer = copy.deepcopy((model, optimizer))

    @property
    def nbytes(self) -> int:
        """The memory of parameters, buffers and the optimizer's moments."""
        return sum(t.nbytes for t in (*self._tensors().values(), *self._moments()[1].values()))

    def synchronize(self) -> None:
        """Make parameters, buffers, modes and the optimizer's state those of the original."""
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), self._original.parameters(), strict=True):
                own.copy_(other)
                own.requires_grad_(other.requires_grad)
            for mine, theirs in zip(self.model.modules(), self._original.modules(), strict=True):
                for name, buffer in theirs.named_buffers(recurse=False):
                    setattr(mine, name, buffer.detach().clone())  # its shape may have changed
        self.set_modes(modes(self._original))
        self._optimizer.load_state_dict(copy.deepcopy(self._original_optimizer.state_dict()))

    def set_modes(self, training: Iterable[bool]) -> None:
        """Set ``training`` of every module, as :func:`modes` returns it."""
        for module, mode in zip(self.model.modules(), training, strict=True):
            module.training = mode

    def step(
        self,
        probes: Probes,
        losses: Sequence[tuple[float, Any]],
        *,
        clip: float = 1.0,
        learning_rate: float | None = None,
        turn: int | None = None,
    ) -> None:
        """Take one training step on a weighted sum of losses.

        Args:
            losses: factors and batches. Batches are drawn by the caller, since drawing may use the run's random
                stream, which is restored here.
            clip: the factor of the gradient, as clipping multiplies the original's.
            learning_rate: in place of the original's.
            turn: the index among several steps of the copy at one step of the run, so that each has its own
                dropout masks.
        """
        with torch.random.fork_rng(cuda_devices(self.model.parameters())), torch.enable_grad():
            if turn is not None:
                torch.manual_seed(int(torch.randint(2**62, ())) + turn)
            for factor, batch in losses:
                (factor * clip * probes.loss(self.model, batch)).backward()
        groups = zip(self._optimizer.param_groups, self._original_optimizer.param_groups, strict=True)
        for own, group in groups:
            own.update({key: value for key, value in group.items() if key != "params"})
            if learning_rate is not None:
                own["lr"] = learning_rate
        with torch.enable_grad():
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Return the optimizer's plain values; and parameters, buffers and moments."""
        plain, moments = self._moments()
        model = {f"model.{name}": tensor for name, tensor in self._tensors().items()}
        return plain, {**model, **{f"optimizer.{name}": tensor for name, tensor in moments.items()}}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
        self.synchronize()  # for modes, buffers of the right shape and the optimizer's settings
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[f"model.{name}"])
        restored: dict[int, dict[str, Any]] = {
            int(index): dict(cast("dict[str, Any]", one)) for index, one in values.items()
        }
        for key, tensor in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                restored.setdefault(int(index), {})[name] = tensor.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": restored})

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{name: p.detach() for name, p in self.model.named_parameters()},
            **dict(self.model.named_buffers()),
        }

    def _moments(self) -> tuple[Json, dict[str, Tensor]]:
        plain: Json = {}
        tensors: dict[str, Tensor] = {}
        for index, state in self._optimizer.state_dict()["state"].items():
            plain[str(index)] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
            tensors.update({f"{index}.{k}": v for k, v in state.items() if isinstance(v, Tensor)})
        return plain, tensors
