"""The H of a round (Eq. 7): how the effect of a gradient fades over the steps that follow it.

A curvature gives one coefficient per parameter. A number c says ``P H ~ c I`` for that parameter, P the
optimizer's preconditioner (the identity for SGD, the paper's case); a tensor is the diagonal of H.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.responses import StepResponse
from mixwell.typing import Gradients

Coefficients = list[float | Tensor]


@final
@dataclass(frozen=True)
class RoundStart:
    """What is known when a round begins.

    Args:
        domains: the names of the domains.
        weights: their weights in the new round.
        validation: the validation gradient at the current parameters, ``None`` before the first one.
        responses: tells how each parameter answers a gradient now; called only where it is needed.
    """

    domains: Sequence[str]
    weights: Sequence[float]
    validation: Gradients | None
    responses: Callable[[], Sequence[StepResponse]]


class Curvature(ABC):
    """The curvature of the weighted training loss, exact or approximate."""

    exact_products: bool = False
    """Whether the signal must take Hessian products itself, at every step (Algorithm 1)."""

    def bind(self, parameters: Parameters) -> None:
        """Learn of the parameters, and check that this curvature fits them.

        Args:
            parameters: what is trained.
        """
        self.parameters = parameters

    def begin_round(self, start: RoundStart) -> None:
        """Prepare H of a round.

        Args:
            start: what is known.
        """

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The coefficient of every parameter in this round."""

    def summary(self) -> float | None:
        """One number for reports, where there is one."""
        return None

    def state(self) -> dict[str, Tensor]:
        """What a run resumed in mid-round needs to know."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: its tensors.
        """


@final
class IsotropicCurvature(Curvature):
    """``H = gamma I``, the paper's practical choice (appendix "A Practically-Usable Hessian Approximation").

    Args:
        gamma: the curvature; the paper's experiments use 0.01.

    Raises:
        ValueError: gamma is negative or not finite.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = checked_gamma("gamma", gamma)

    def __repr__(self) -> str:
        return f"IsotropicCurvature({self.gamma!r})"

    def coefficients(self) -> Coefficients:
        """Gamma for every parameter."""
        return [self.gamma] * len(self.parameters)

    def summary(self) -> float:
        """Gamma."""
        return self.gamma


@final
class PerTensorCurvature(Curvature):
    """One gamma per parameter tensor.

    Args:
        gammas: by parameter name.
        default: for the parameters that are not named.

    Raises:
        ValueError: a gamma is negative or not finite, or (when bound) a name is unknown.
    """

    def __init__(self, gammas: Mapping[str, float], *, default: float = 0.0) -> None:
        self.gammas = {name: checked_gamma(name, gamma) for name, gamma in gammas.items()}
        self.default = checked_gamma("default", default)

    def __repr__(self) -> str:
        return f"PerTensorCurvature({self.gammas}, default={self.default!r})"

    def bind(self, parameters: Parameters) -> None:
        """Check the names.

        Args:
            parameters: what is trained.
        """
        _check_names(self.gammas, parameters)
        super().bind(parameters)

    def coefficients(self) -> Coefficients:
        """The gamma of every parameter."""
        return [self.gammas.get(name, self.default) for name in self.parameters.names]


@final
class DiagonalCurvature(Curvature):
    """``H = diag(d)``.

    Args:
        diagonals: the diagonal of the Hessian by parameter name, each of the parameter's shape; zero for the
            parameters that are not named.
    """

    def __init__(self, diagonals: Mapping[str, Tensor]) -> None:
        self.diagonals = {name: value.detach() for name, value in diagonals.items()}

    def __repr__(self) -> str:
        return f"DiagonalCurvature({sorted(self.diagonals)})"

    def bind(self, parameters: Parameters) -> None:
        """Check names and shapes.

        Args:
            parameters: what is trained.

        Raises:
            ValueError: a name is unknown or a shape does not fit.
        """
        _check_names(self.diagonals, parameters)
        for name, tensor in zip(parameters.names, parameters.tensors, strict=True):
            given = self.diagonals.get(name)
            if given is not None and given.shape != tensor.shape:
                raise ValueError(
                    f"the diagonal of {name} has shape {tuple(given.shape)}, "
                    f"but the parameter has shape {tuple(tensor.shape)}"
                )
            if given is not None:
                self.diagonals[name] = distributed.distribute_like(given, tensor)
        super().bind(parameters)

    def coefficients(self) -> Coefficients:
        """The diagonal of every parameter."""
        return [self.diagonals.get(name, 0.0) for name in self.parameters.names]


@final
class ExactCurvature(Curvature):
    """Hessian products with the current batches at every step: Algorithm 1, Prop. "recursion".

    It costs m second-order passes per domain and step, and needs ``loss.backward(create_graph=True)`` in
    every ``mixer.domain(...)``. A reference for small problems.
    """

    exact_products = True

    def __repr__(self) -> str:
        return "ExactCurvature()"

    def coefficients(self) -> Coefficients:
        """Zeros: the products are taken by the traces."""
        return [0.0] * len(self.parameters)


def resolve(curvature: Curvature | float | None) -> Curvature:
    """The curvature that a setting means.

    Args:
        curvature: a curvature, a number (gamma), or ``None`` for the paper's gamma of 0.01.

    Returns:
        The curvature.
    """
    if curvature is None:
        return IsotropicCurvature(0.01)
    return curvature if isinstance(curvature, Curvature) else IsotropicCurvature(curvature)


def checked_gamma(name: str, gamma: float) -> float:
    """A curvature that makes sense.

    Args:
        name: what it is called, for the message.
        gamma: the number.

    Returns:
        The number.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"curvature {name} must be finite and not negative, got {gamma}")
    return float(gamma)


def _check_names(given: Mapping[str, object], parameters: Parameters) -> None:
    unknown = sorted(set(given) - set(parameters.names))
    if unknown:
        raise ValueError(f"curvature names unknown parameters {unknown}; known: {list(parameters.names)}")
