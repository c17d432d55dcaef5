"""eta, P and lambda of a step: the interface to optimizers, their registry, and a fallback for the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.parameters import Parameters
from mixwell.utils.registry import TypeRegistry
from mixwell.utils.user_warnings import warn_user


class Preconditioner(ABC):
    """The linear map P that an optimizer applies to the gradient of one parameter.

    Adam's is a diagonal. It may be any other, such as matrices on both sides of the gradient (Shampoo), or the
    derivative of an orthogonalized update at the current momentum (Muon).
    """

    @abstractmethod
    def apply(self, gradient: Tensor) -> Tensor:
        """Return ``P g``, a new tensor of the parameter's shape."""

    def apply_adjoint(self, vector: Tensor) -> Tensor:
        """Return ``P^T v``; by default P is symmetric."""
        return self.apply(vector)

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of P, of the parameter's shape, where P acts on every element separately, else ``None``."""
        return None


@final
class DiagonalPreconditioner(Preconditioner):
    """``P g = values * g``."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @override
    def apply(self, gradient: Tensor) -> Tensor:
        return gradient * self._values

    @property
    @override
    def diagonal(self) -> Tensor:
        return self._values


@final
@dataclass(frozen=True)
class StepResponse:
    """The response of one parameter to a unit of gradient in this step, with momentum folded in.

    Args:
        rate: eta times the effect of momentum until the end of the round.
        preconditioner: computes P from the optimizer's state at the time of the call, ``None`` for the identity.
        folded: whether ``rate`` stands for several steps' momentum, so that a decay must be kept in bounds.
        decoupled: the fraction of the parameter that decoupled weight decay takes (eta lambda).
        coupled: lambda of weight decay that is added to the gradient.
    """

    rate: float
    preconditioner: Callable[[], Preconditioner] | None = None
    folded: bool = False
    decoupled: float = 0.0
    coupled: float = 0.0

    @cached_property
    def _current(self) -> Preconditioner | None:
        # At the first use: P is as large as the parameter, and not every kind of traces needs it in every step.
        return None if self.preconditioner is None else self.preconditioner()

    @property
    def diagonal(self) -> Tensor | None:
        """The diagonal of P; ``None`` for the identity, and for a P that is not :attr:`elementwise`."""
        return None if self._current is None else self._current.diagonal

    @property
    def elementwise(self) -> bool:
        """Whether P acts on every element separately."""
        return self._current is None or self._current.diagonal is not None

    def precondition(self, gradient: Tensor) -> Tensor:
        """Return ``P g``: the gradient itself where P is the identity, else a new tensor."""
        return gradient if self._current is None else self._current.apply(gradient)

    def precondition_adjoint(self, vector: Tensor) -> Tensor:
        """Return ``P^T v``: the vector itself where P is the identity, else a new tensor."""
        return vector if self._current is None else self._current.apply_adjoint(vector)

    def shrink(self, curvature: float, *, clip: float) -> float | Tensor:
        """Return the factor of the old trace: ``1 - eta lambda - eta P H``.

        The curvature stands for the preconditioned ``P H`` itself (one number sums it up best in the
        optimizer's own geometry). For plain SGD this is the paper's factor, whatever its sign. Where momentum
        or a preconditioner makes ``rate`` stand for more than one step, a factor below zero means that the
        effect is gone before the round ends, and counts as zero.

        Args:
            clip: the factor by which gradient clipping shortens gradients.

        Returns:
            A number, or a tensor of the parameter's shape where P multiplies the weight decay.
        """
        factor: float | Tensor = 1.0 - self.decoupled - self.rate * clip * curvature
        if self.coupled and not self.elementwise:
            raise ValueError(
                "weight decay that is added to the gradient is not supported with a preconditioner that is not "
                "diagonal; use decoupled weight decay"
            )
        if self.coupled:
            factor = factor - self.rate * self.coupled * (1.0 if self.diagonal is None else self.diagonal)
        if not self.folded and self.preconditioner is None:
            return factor
        return factor.clamp_min(0.0) if isinstance(factor, Tensor) else max(factor, 0.0)


class OptimizerResponse(ABC):
    """A view of a live optimizer; it reads the optimizer's settings and state and changes nothing."""

    preconditions: bool = False
    """Whether P is not the identity, at least after the first step."""

    def __init__(self, optimizer: Optimizer, parameters: Parameters) -> None:
        self.optimizer = optimizer
        self.parameters = parameters

    @abstractmethod
    def response(self, index: int, *, remaining: int) -> StepResponse:
        """Return the folded response of a parameter, from the state before the step.

        Args:
            remaining: steps until the end of the round, including this one, in which momentum can act.
        """

    def differentiate_step(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """Differentiate this step: update a domain's trace and the derivatives of the moments in place.

        Args:
            gradient: the gradient that the optimizer is about to receive.
            source: ``d gradient / d w_j``.
            trace: ``z_j = -d theta / d w_j``.
            moments: the derivatives of the optimizer's moments by ``w_j``.
        """
        raise NotImplementedError

    @property
    def moments(self) -> int:
        """The number of tensors per parameter and domain that the derivatives of the optimizer's state take."""
        return 0

    def separable_scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return r and c with ``P ~ r c^T`` for a parameter as a matrix, its first dimension by all others.

        Shapes ``(outputs,)`` and ``(inputs,)``, of the full parameter where it is sharded; all processes must call
        it. ``None`` where P is the identity or there is no such product near it.
        """
        return None

    def count_step(self) -> None:
        """Take note that the optimizer is about to step."""

    def read_counts(self) -> None:
        """Read the number of steps that the optimizer has taken, where it keeps that on a device."""

    def forget_counts(self) -> None:
        """Read the numbers of steps again when they are needed: the optimizer may have been loaded."""

    def invalidate(self) -> None:
        """Drop cached values, because the optimizer may have stepped."""

    def check_differentiable(self, moments: int) -> None:
        """Raise ``ValueError`` for settings that :meth:`differentiate_step` does not support.

        Args:
            moments: the number of derivatives of moments that there is memory for.
        """
        if type(self).differentiate_step is OptimizerResponse.differentiate_step:
            raise ValueError(
                f"{type(self).__name__} does not differentiate the steps of {type(self.optimizer).__name__}, as "
                "ForwardModeTraces require; use DenseTraces()"
            )
        if self.moments > moments:
            raise ValueError(
                "the optimizer's momentum was switched on after the mixer was made; make a new Mixer, or use "
                "DenseTraces()"
            )

    def group(self, index: int) -> dict[str, Any]:
        """Return the current settings of a parameter's group, so that every lr schedule is followed."""
        return self.optimizer.param_groups[self.parameters.groups[index]]

    def state(self, index: int) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, empty before its first step."""
        return self.optimizer.state.get(self.parameters.tensors[index], {})


RESPONSES = TypeRegistry[type[OptimizerResponse]]("optimizer", package="mixwell.hypergradient.responses")
"""The response of every supported type of optimizer."""


@final
class PlainResponse(OptimizerResponse):
    """``theta <- theta - lr g``: all that is assumed of an optimizer that is not registered."""

    @override
    def response(self, index: int, *, remaining: int) -> StepResponse:
        return StepResponse(rate=float(self.group(index)["lr"]))

    @override
    def differentiate_step(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        trace.add_(source, alpha=float(self.group(index)["lr"]))


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate and Lightning.

    Other wrappers change the steps, so they are not removed.
    """
    known = type(optimizer).__module__.startswith(("accelerate.", "lightning.", "pytorch_lightning."))
    inner = getattr(optimizer, "optimizer", None) if known else None
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def response_for(optimizer: Optimizer, parameters: Parameters) -> OptimizerResponse:
    """Return the registered response of an optimizer.

    A subclass of a registered type is served by that type's response unless it overrides ``step``. Any other
    optimizer is treated as :class:`PlainResponse`, with a warning.
    """
    found = RESPONSES.find(optimizer)
    if found is not None and _inherits_step(type(optimizer)):
        return found(optimizer, parameters)
    warn_user(
        f"mixwell does not know the optimizer {type(optimizer).__name__}: its steps are treated as "
        "theta <- theta - lr * gradient. The direction of the hypergradient may suffer; known are "
        f"{', '.join(kind.__name__ for kind in RESPONSES.types())}, and RESPONSES.register adds others"
    )
    return PlainResponse(optimizer, parameters)


def _inherits_step(kind: type[Optimizer]) -> bool:
    """Whether no class below the nearest registered one has a ``step`` of its own (torch's AdamW has none)."""
    registered = RESPONSES.types()
    nearest = next(place for place, cls in enumerate(kind.__mro__) if cls in registered)
    below = kind.__mro__[:nearest]
    return not any("step" in vars(cls) and not cls.__module__.startswith("torch.optim") for cls in below)
