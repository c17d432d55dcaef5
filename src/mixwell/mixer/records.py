"""What happened in each round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, final

VALIDATION = "validation"
"""The name under which records have the validation loss and skipped validation gradients."""


@final
@dataclass(frozen=True)
class RoundRecord:
    """One round: what was trained with, what was measured, and what came of it.

    Args:
        index: the number of the round, from 0.
        first_step: the number of training steps before it.
        steps: its length.
        weights: of the domains in this round.
        scores: the hypergradient by domain; the weights move against it. Empty where it had to be left out.
        step_size: alpha of the update (0 where the update was left out).
        new_weights: of the domains in the next round.
        losses: the mean of the losses that were observed, by domain, where they were.
        skipped: how many non-finite contributions were left out, by domain, where there were any;
            ``"validation"`` counts validation points (with all of them the update).
        noise: the standard error of each score, from the scatter of the scores at the round's validation points;
            of one point from the parts of its batch, where there were several. It contains the noise of the
            iterates (of one point: not even that) and of the validation batches, not that of the traces.
        points: the number of validation points over which the scores are the mean; 0 where they had to be left
            out.
        measured: more numbers of the signal and the update: the measured curvature, the trust in the scores
            (:func:`mixwell.simplex.updates.trust`), the gain of the step size.
    """

    index: int
    first_step: int
    steps: int
    weights: dict[str, float]
    scores: dict[str, float]
    step_size: float
    new_weights: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict[str, float])
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    noise: dict[str, float] = field(default_factory=dict[str, float])
    points: int = 1
    measured: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return asdict(self)
