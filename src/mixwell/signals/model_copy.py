"""A copy of a model with a copy of its optimizer, which Skill-It, Aioli and TANDEM train on other rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell.hypergradient.parameters import cuda_devices
from mixwell.signals.finite_draws import FiniteDraws
from mixwell.signals.probes import Probes, evaluation_loss, modes
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
        draws: FiniteDraws,
        parts: Sequence[tuple[float, str]],
        *,
        clip: float = 1.0,
        learning_rate: float | None = None,
        turn: int | None = None,
    ) -> None:
        """Take one training step on a weighted sum of losses, without those that are not finite.

        Args:
            parts: factors, and the domains (or ``"validation"``) of which a batch is drawn for each.
            clip: the factor of the gradient, as clipping multiplies the original's.
            learning_rate: in place of the original's.
            turn: the index among several steps of the copy at one step of the run, so that each has its own
                dropout masks.
        """
        # Drawing may use the run's random stream, which is restored after the losses.
        batches = [draws.batch(name) for _, name in parts]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with torch.random.fork_rng(cuda_devices(self.model.parameters())), torch.enable_grad():
            if turn is not None:
                torch.manual_seed(int(torch.randint(2**62, ())) + turn)
            for (factor, name), batch in zip(parts, batches, strict=True):

                def gradient(batch: Any, factor: float = factor) -> tuple[Any, Sequence[Tensor | None]]:
                    loss = factor * clip * probes.loss(self.model, batch)
                    return batch, torch.autograd.grad(loss, trained, allow_unused=True)

                def finite(found: tuple[Any, Sequence[Tensor | None]]) -> bool:
                    # Where the original has a finite loss, the copy has diverged, which its losses will show.
                    return _all_finite(found[1]) or math.isfinite(
                        evaluation_loss(probes, self._original, found[0])
                    )

                found = draws.compute(name, gradient, finite, first=batch)
                for parameter, one in zip(trained, () if found is None else found[1], strict=False):
                    if one is not None:
                        parameter.grad = one if parameter.grad is None else parameter.grad.add_(one)
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


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
