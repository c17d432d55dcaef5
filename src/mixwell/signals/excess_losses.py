"""How much worse the model is than a reference model, by domain."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from mixwell.signals.domain_losses import Absent, SummedLosses, mean_of
from mixwell.typing import Vector

Clip = Literal["element", "domain", "none"]
Objective = Literal["losses", "excess"]


@final
class ExcessLosses(SummedLosses):
    """The clipped excess loss over a reference model: what can still be learned gets more weight (DoReMi).

        ``lam_j = mean over the tokens of domain j of max(0, loss - loss of the reference)``

        ``score_j = -sum over the steps of lam_j``

    With ``UniformSmoothing(MirrorDescent(eta), c)`` and T = 1 this is DoReMi's rule. A longer round does
    in one move what
    its T steps would add up to with the weights held.

    Args:
        clip: where the excess is cut at zero: ``"element"``, each loss that is told (of a token, where those of
            tokens are told; else of a row, else the mean of a part), ``"domain"``, the mean of a domain's batch,
            or ``"none"``.
        absent: what a domain counts with in a step that it is not in: its ``"last"`` excess (0 until it was
            seen), or ``"zero"``.
        objective: what the training step makes less, for whoever trains: the weighted ``"losses"``, or the
            weighted ``"excess"``, cut at zero.

    Raises:
        ValueError: there is no such choice.

    References:
        Xie et al.: DoReMi, optimizing data mixtures speeds up language model pretraining (2023), Algorithm 1.
    """

    def __init__(
        self, clip: Clip = "element", *, absent: Absent = "last", objective: Objective = "losses"
    ) -> None:
        super().__init__(absent)
        if clip not in ("element", "domain", "none"):
            raise ValueError(f"clip must be 'element', 'domain' or 'none', got {clip!r}")
        if objective not in ("losses", "excess"):
            raise ValueError(f"objective must be 'losses' or 'excess', got {objective!r}")
        self.clip: Clip = clip
        self._objective: Objective = objective

    def __repr__(self) -> str:
        return f"ExcessLosses({self.clip!r}, absent={self.absent!r}, objective={self.objective!r})"

    @property
    def needs_reference(self) -> bool:
        """It compares with one."""
        return True

    @property
    def objective(self) -> Objective:
        """What the training step makes less."""
        return self._objective

    def value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float:
        """The mean excess, each element cut at zero where that is asked for.

        Args:
            domain: whose.
            losses: of its rows or tokens, or their mean.
            reference: those of the reference model.

        Returns:
            One number.

        Raises:
            ValueError: a loss is not finite, where a zero would stand for it.
        """
        assert reference is not None  # the mixer has seen to it
        excess = losses - reference
        if not bool(torch.isfinite(excess).all()):
            raise ValueError(
                f"the losses of domain {self._domains[domain]!r} less those of the reference model are not "
                "finite; look at the reference model on that batch"
            )
        return mean_of(excess.clamp(min=0) if self.clip == "element" else excess)

    def take(self, losses: Vector) -> None:
        """Add a step.

        Args:
            losses: the mean excess by domain, NaN for those that were not in it, shape ``(m,)``.
        """
        # Only now, when the parts of a domain's batch have come together. A NaN stays one.
        super().take(losses.clip(min=0.0) if self.clip == "domain" else losses)
