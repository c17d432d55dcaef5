"""The record of a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, final

SCORES = "scores"
"""The name under which scores that overflowed are counted."""
AUXILIARY = "auxiliary loss"
"""The name under which skipped gradients of ``mixer.auxiliary()`` are counted."""


@final
@dataclass(frozen=True)
class RoundRecord:
    """One round: its weights, the scores that were measured, and the new weights.

    Args:
        index: the number of the round, from 0.
        first_step: the number of training steps before it.
        weights: the weights during the round, by domain.
        scores: the hypergradient by domain; the weights move against it. Empty where it was not finite.
        step_size: alpha of the update, 0 where there was none.
        new_weights: the weights of the next round, by domain.
        losses: the means of the recorded losses, by domain.
        skipped: the number of non-finite contributions that were skipped, by domain, in training steps and in
            what the signal computes outside of them; ``"validation"`` counts batches of the validation set, and
            ``"scores"`` scores that overflowed. Without any point there is no update.
        noise: the standard error of each score, from the scatter of the scores at the round's validation points;
            of one point from the parts of its batch, where there were several. It contains the noise of the
            iterates (of one point: not even that) and of the validation batches, not that of the traces.
        points: the number of validation points that the scores are the mean over.
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
