"""A second network beside the trained one, which may also learn from the validation set."""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters, cuda_devices
from mixwell.hypergradient.traces.base import Combined
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Json, Vector


@final
class TwinNetworks(Signal):
    r"""Whether a domain's loss falls where the model also learns from the validation set (TANDEM).

    For the last ``K`` steps of a round a twin w of the model u is trained beside it, from the same parameters:

        ``u <- u - eta sum_j w_j grad l_j(u)``
        ``w <- w - eta (grad L_V(w) + gamma sum_j w_j grad l_j(w))``

    and the score of a domain is ``gamma (l_j(w_K) - l_j(u_K))``, both on the same fresh rows. u is the model in
    its ordinary training steps; w has an optimizer of its own of the same kind, whose state is copied with the
    parameters, and its gradient is shortened by the factor by which clipping shortens the model's in that step.
    For plain SGD this is the published rule.

    A round of T steps is an episode: ``T - K`` free steps, then the K steps with a twin; with ``T < K`` all steps
    have one. Losses are compared in evaluation mode, so that both models see them without dropout.

    Args:
        probe_steps: K, steps with a twin before each update.
        gamma: how much the training loss counts for the twin beside the validation loss.
        learning_rate: of the twin; by default what the model's optimizer has in the same step.

    Raises:
        ValueError: a setting is not positive.

    References:
        Wang et al., "TANDEM: bi-level data mixture optimization with twin networks" (2025).
    """

    def __init__(
        self, *, probe_steps: int = 5, gamma: float = 1.0, learning_rate: float | None = None
    ) -> None:
        if probe_steps < 1:
            raise ValueError(f"probe_steps must be at least 1, got {probe_steps}")
        for name, value in (("gamma", gamma), ("learning_rate", learning_rate)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        self.probe_steps, self.gamma, self.learning_rate = int(probe_steps), float(gamma), learning_rate
        self._attached = False

    def __repr__(self) -> str:
        return (
            f"TwinNetworks(probe_steps={self.probe_steps}, gamma={self.gamma!r}, "
            f"learning_rate={self.learning_rate!r})"
        )

    @property
    def supports_mixed_batches(self) -> bool:
        """Training itself is not looked at."""
        return True

    @property
    def needs_validation(self) -> bool:
        """The validation set is read through probes."""
        return False

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Take the memory of the twin.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: where rows and losses come from, the validation set's too.

        Raises:
            ValueError: it is in use by another mixer, whose twin it holds.
        """
        if self._attached:
            raise ValueError("this Twins is in use by another mixer; make a new one for each")
        self._probes = expected_probes(self, probes, parameters, domains, validation=True)
        self._domains = tuple(domains)
        self._twin = Twin(self._probes.model, optimizer)
        self._weights = np.full(len(domains), 1 / len(domains))
        self._probing = False
        self._attached = True

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Forget the twin of the round before.

        Args:
            round_index: not used.
            weights: of the domains, shape ``(m,)``.
            validation: not used.
        """
        self._weights = weights.copy()
        self._probing = False

    def begin_step(self, *, remaining: int) -> None:
        """Where the last K steps begin, make the twin the same as the model.

        Args:
            remaining: steps until the end of the round, this one included.
        """
        if remaining <= self.probe_steps and not self._probing:
            self._twin.synchronize()
            self._probing = True

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing.

        Args:
            row_groups: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(CaptureContext())

    def end_step(self, combined: Combined) -> None:
        """The twin takes its step, as the model is about to.

        Args:
            combined: what the model's optimizer is about to be given.
        """
        if not self._probing:
            return
        losses = [(1.0, self._probes.validation_batch())]
        for name, weight in zip(self._domains, self._weights.tolist(), strict=True):
            losses.append((self.gamma * weight, self._probes.batch(name)))
        self._twin.step(self._probes, losses, clip=combined.clip, learning_rate=self.learning_rate)

    def scores(self, validation: Gradients | None) -> Vector:
        """``gamma (l_j(w_K) - l_j(u_K))``.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
        if not self._probing:  # none of the steps with the twin could be taken
            return np.zeros(len(self._domains))
        found: list[float] = []
        for name in self._domains:
            batch = self._probes.batch(name)
            found.append(
                measured(self._probes, self._twin.model, batch)
                - measured(self._probes, self._probes.model, batch)
            )
        return self.gamma * np.array(found)

    @property
    def nbytes(self) -> int:
        """The memory of the twin and of its optimizer."""
        return self._twin.nbytes

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The weights of the round, and the twin while there is one."""
        values: Json = {"weights": self._weights.tolist(), "probing": self._probing}
        if not self._probing:
            return values, {}
        remembered, tensors = self._twin.state()
        return {**values, "twin": remembered}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: plain values.
            tensors: the twin.
        """
        self._weights = np.array(values["weights"], dtype=np.float64)
        self._probing = bool(values["probing"])
        if self._probing:
            self._twin.load_state(cast("Json", values["twin"]), tensors)


@final
class Twin:
    """A copy of a model with a copy of its optimizer, to be trained beside it on other rows.

    Args:
        model: the trained one.
        optimizer: that trains it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._original, self._leader = model, optimizer
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
                    setattr(mine, name, buffer.detach().clone())  # of another shape perhaps by now
        self.set_modes(modes(self._original))
        self._optimizer.load_state_dict(copy.deepcopy(self._leader.state_dict()))

    def set_modes(self, training: Iterable[bool]) -> None:
        """Say which modules train and which evaluate.

        Args:
            training: one for each module, as :func:`modes` gives them.
        """
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
        """One training step on a weighted sum of losses.

        Args:
            probes: gives losses of batches.
            losses: factors and batches. They were drawn outside, since drawing may use the run's own random
                stream, which is left here as it was.
            clip: by which the gradient is multiplied, as clipping does with the original's.
            learning_rate: in place of the original's.
            turn: of several steps at the same moment of the run, so that each has dropout masks of its own.
        """
        with torch.random.fork_rng(cuda_devices(self.model.parameters())), torch.enable_grad():
            if turn is not None:
                torch.manual_seed(int(torch.randint(2**62, ())) + turn)
            for factor, batch in losses:
                (factor * clip * probes.loss(self.model, batch)).backward()
        for own, group in zip(self._optimizer.param_groups, self._leader.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
            if learning_rate is not None:
                own["lr"] = learning_rate
        with torch.enable_grad():
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What the optimizer remembers in plain values; parameters, buffers and moments."""
        plain, moments = self._moments()
        model = {f"model.{name}": tensor for name, tensor in self._tensors().items()}
        return plain, {**model, **{f"optimizer.{name}": tensor for name, tensor in moments.items()}}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: plain values.
            tensors: the tensors.
        """
        self.synchronize()  # for modes, buffers of the right shape and the optimizer's settings
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[f"model.{name}"])
        remembered: dict[int, dict[str, Any]] = {
            int(index): dict(cast("dict[str, Any]", one)) for index, one in values.items()
        }
        for key, tensor in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".", 2)
                remembered.setdefault(int(index), {})[name] = tensor.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": remembered})

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{name: p.detach() for name, p in self.model.named_parameters()},
            **dict(self.model.named_buffers()),
        }

    def _moments(self) -> tuple[Json, dict[str, Tensor]]:
        plain: Json = {}
        tensors: dict[str, Tensor] = {}
        for index, remembered in self._optimizer.state_dict()["state"].items():
            plain[str(index)] = {k: v for k, v in remembered.items() if not isinstance(v, Tensor)}
            tensors.update({f"{index}.{k}": v for k, v in remembered.items() if isinstance(v, Tensor)})
        return plain, tensors


def modes(model: nn.Module) -> list[bool]:
    """Which modules of a model train, and which evaluate.

    Args:
        model: any.

    Returns:
        One for each module.
    """
    return [module.training for module in model.modules()]


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put a model into evaluation mode for a while: without dropout, with BatchNorm's running statistics.

    Args:
        model: any. Afterwards every module has the mode that it had.

    Yields:
        Nothing.
    """
    before = modes(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in zip(model.modules(), before, strict=True):
            module.training = mode


def measured(probes: Probes, model: nn.Module, batch: Any) -> float:
    """The loss of a batch in evaluation mode; the run's random stream is left as it was.

    Args:
        probes: gives the loss.
        model: the model, or a copy of it.
        batch: rows.

    Returns:
        The mean loss.
    """
    with evaluating(model), torch.random.fork_rng(cuda_devices(model.parameters())):
        return probes.value(model, batch)


def expected_probes(
    signal: Signal,
    probes: Probes | None,
    parameters: Parameters,
    domains: Sequence[str],
    *,
    validation: bool,
) -> Probes:
    """The probes that a signal needs, or an error that says what is missing.

    Args:
        signal: that needs them.
        probes: what the loop gave.
        parameters: what is trained.
        domains: of which rows are needed.
        validation: whether rows of the validation set are needed, too.

    Returns:
        The probes.

    Raises:
        ValueError: there are none, or they lack something.
    """
    if probes is None:
        raise ValueError(
            f"{signal!r} computes losses of its own beside training: give Mixer(..., probes=Probes(model, loss, "
            "domains, validation))"
        )
    probes.expect(domains, signal)
    if validation and not probes.has_validation:
        raise ValueError(
            f"{signal!r} needs a validation set: give Mixer(..., probes=Probes(..., validation=...))"
        )
    known = {id(p) for p in probes.model.parameters()}
    strange = [
        name for name, p in zip(parameters.names, parameters.tensors, strict=True) if id(p) not in known
    ]
    if strange:
        raise ValueError(
            f"the probes have another model than the one that is trained ({strange[0]} is not in it); give the "
            "trained one to Probes"
        )
    distributed.require_single_process(signal)
    return probes
