"""How much worse the model is than a reference model, by domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from mixwell.signals.domain_losses import Absent, SummedLosses, mean_of
from mixwell.typing import Vector

Clip = Literal["element", "domain", "none"]
Objective = Literal["losses", "excess"]


@final
class ExcessLosses(SummedLosses):
    """The clipped excess loss over a reference model: domains with more left to learn get more weight (DoReMi).

        ``lam_j = mean over the tokens of domain j of max(0, loss - loss of the reference)``

        ``score_j = -sum over the steps of lam_j``

    With ``UniformSmoothing(MirrorDescent(eta), c)`` and T = 1 this is DoReMi's rule. A longer round takes the T
    steps' updates in one, with the weights held.

    Args:
        clip: where the excess is clipped at zero: ``"element"``, each recorded loss (of a token, of a row, or the
            mean of a part), ``"domain"``, the mean of a domain's batch, or ``"none"``.
        absent: what a domain counts with in a step without it: its ``"last"`` excess (0 until it was seen), or
            ``"zero"``.
        objective: what the training step minimizes: the weighted ``"losses"``, or the weighted ``"excess"``,
            clipped at zero.

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
        self.requirements = replace(self.requirements, reference=True, objective=objective)

    def __repr__(self) -> str:
        objective = self.requirements.objective
        return f"ExcessLosses({self.clip!r}, absent={self.absent!r}, objective={objective!r})"

    @override
    def _value(self, domain: int, losses: Tensor, reference: Tensor | None) -> float:
        assert reference is not None  # the mixer requires it
        excess = losses - reference
        if not bool(torch.isfinite(excess).all()):  # clipping would turn it into a zero
            raise ValueError(
                f"the losses of domain {self._domains[domain]!r} less those of the reference model are not "
                "finite; look at the reference model on that batch"
            )
        return mean_of(excess.clamp(min=0) if self.clip == "element" else excess)

    @override
    def _take(self, losses: Vector) -> None:
        # Only now, when the parts of a domain's batch have come together. A NaN stays one.
        super()._take(losses.clip(min=0.0) if self.clip == "domain" else losses)
