"""The policy for losses and gradients that are not finite."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.scopes import DomainScope
from mixwell.typing import Gradients
from mixwell.utils.user_warnings import warn_user

NonFinitePolicy = Literal["raise", "skip"]


@final
class NonFiniteGuard:
    """Finds non-finite contributions before they are used, and raises or counts. They never become zeros.

    Args:
        policy: ``"raise"``, or ``"skip"``: skip the contribution, warn once per domain, and count.
    """

    def __init__(self, policy: NonFinitePolicy) -> None:
        if policy not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {policy!r}")
        self.policy = policy
        self.total: dict[str, int] = {}
        """The number of skipped contributions by domain."""
        self.in_round: dict[str, int] = {}
        """The number of those in the current round."""

    def accept_scope(self, scope: DomainScope, step: int, parameters: Parameters) -> bool:
        """Return whether a loss and its gradient are finite; otherwise raise or count, by the policy."""
        name, problem = scope.batch.domain, _problem(parameters, scope.gradients, scope.loss)
        if self.policy == "skip" and parameters.sharded:
            # Each rank sees a part of the gradient, and all must do the same.
            found = distributed.any_rank(problem is not None, parameters.device)
            problem = "gradient on another rank" if found and problem is None else problem
        if problem is None:
            return True
        self.reject(
            name,
            f"non-finite {problem} in {name!r} at step {step}",
            "Look at that batch, or lower the learning rate",
        )
        return False

    def reject(self, name: str, problem: str, remedy: str) -> None:
        """Raise a FloatingPointError or count, by the policy.

        Args:
            name: the domain, or another source of contributions, to count for.
        """
        if self.policy == "raise":
            raise FloatingPointError(
                f"{problem}; it was not used. {remedy}, or set on_nonfinite to 'skip' (mixer.on_nonfinite in a "
                "config) to leave such contributions out"
            )
        if name not in self.total:
            warn_user(f"{problem}: skipped; later occurrences will be skipped silently and counted")
        self.total[name] = self.total.get(name, 0) + 1
        self.in_round[name] = self.in_round.get(name, 0) + 1


def _problem(parameters: Parameters, gradients: Gradients, loss: Tensor | None) -> str | None:
    if loss is not None and not bool(torch.isfinite(loss).all()):
        return f"loss ({float(loss):g})"
    parameter = parameters.non_finite(gradients)
    return None if parameter is None else f"gradient of parameter {parameter}"
