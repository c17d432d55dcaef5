"""The H of a round (Eq. 7): how the effect of a gradient fades over the steps that follow it.

In ``z_j <- (1 - eta gamma) z_j + eta P g_j`` the coefficient gamma stands for ``P H``, one number per parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

from typing_extensions import override

from mixwell.hypergradient.parameters import Parameters


class Curvature(ABC):
    """The curvature of the weighted training loss, exact or approximate."""

    exact_products: bool = False
    """Whether the signal must take Hessian products itself, at every step (Algorithm 1)."""

    def bind(self, parameters: Parameters) -> None:
        """Take the trained parameters. A subclass may refuse those that it does not fit."""
        self.parameters = parameters

    @abstractmethod
    def coefficients(self) -> list[float]:
        """Return one number c per parameter, for ``P H ~ c I`` with the optimizer's preconditioner P."""

    def summary(self) -> float | None:
        """Return one number for reports, where there is one."""
        return None


@final
class IsotropicCurvature(Curvature):
    """``H = gamma I``, the paper's practical choice (appendix "A Practically-Usable Hessian Approximation").

    Args:
        gamma: the paper's experiments use 0.01.
    """

    def __init__(self, gamma: float) -> None:
        if not (math.isfinite(gamma) and gamma >= 0):
            raise ValueError(f"curvature gamma must be finite and not negative, got {gamma}")
        self.gamma = float(gamma)

    def __repr__(self) -> str:
        return f"IsotropicCurvature({self.gamma!r})"

    @override
    def coefficients(self) -> list[float]:
        return [self.gamma] * len(self.parameters)

    @override
    def summary(self) -> float:
        return self.gamma


@final
class ExactCurvature(Curvature):
    """Hessian products with the current batches at every step: Algorithm 1, Prop. "recursion".

    It costs m second-order passes per domain and step, and needs ``loss.backward(create_graph=True)`` in
    every ``mixer.domain(...)``. A reference for small problems.
    """

    exact_products = True

    def __repr__(self) -> str:
        return "ExactCurvature()"

    @override
    def coefficients(self) -> list[float]:
        """Return zeros: the traces receive the products themselves."""
        return [0.0] * len(self.parameters)


def resolve(curvature: Curvature | float | None) -> Curvature:
    """Return the curvature that a setting means: a number is a gamma, ``None`` the paper's gamma of 0.01."""
    if curvature is None:
        return IsotropicCurvature(0.01)
    return curvature if isinstance(curvature, Curvature) else IsotropicCurvature(curvature)
