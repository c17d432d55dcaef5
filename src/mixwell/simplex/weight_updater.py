"""The outer problem's side: from a round's scores to new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from mixwell.simplex import constraints as constraining
from mixwell.simplex import updates
from mixwell.simplex.constraints import Constraint
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.updates import Update
from mixwell.simplex.weights import TINY, Weights
from mixwell.typing import Vector


@final
class WeightUpdater:
    """An update on a constrained simplex.

    Args:
        update: a rule, a number (alpha), or ``None`` for the self-tuned one.
        constraints: where the weights may live.
    """

    def __init__(self, update: Update | float | None, constraints: Sequence[Constraint]) -> None:
        self.update = updates.resolve(update)
        self.update.reset()
        self.constraints = tuple(constraints)

    def start(self, domains: Sequence[str], initial: Mapping[str, float] | Sequence[float] | None) -> Weights:
        """The initial weights, moved to the nearest point that the constraints allow.

        Args:
            domains: their names.
            initial: positive numbers, or ``None`` for uniform.

        Returns:
            The weights.
        """
        weights = Weights(domains, initial)
        self.at_step(0)  # the constraints may have served another run
        if not self.constraints:
            return weights
        allowed = constraining.constrain(weights.names, weights.log, self.constraints)
        return Weights(weights.names, np.maximum(allowed, TINY).tolist())

    def limits(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """The least and the greatest weight that the constraints allow now.

        Args:
            names: the domains.

        Returns:
            Both by domain.
        """
        low, high = constraining.limits(names, self.constraints)
        return dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def at_step(self, steps_done: int) -> None:
        """Set the time of the constraints.

        Args:
            steps_done: training steps before the bounds that are asked for next.
        """
        for constraint in self.constraints:
            constraint.at_step(steps_done)

    def _allows(self, weights: Weights) -> bool:
        low, high = constraining.limits(weights.names, self.constraints)
        return bool(((weights.values >= low - 1e-12) & (weights.values <= high + 1e-12)).all())

    def move(
        self, weights: Weights, scores: Vector | None, clock: RoundClock, *, noise: Vector | None = None
    ) -> float:
        """End a round: one step against the scores.

        Args:
            weights: of the round that ends; they are advanced.
            scores: finite, shape ``(m,)``; ``None`` leaves the weights as they are.
            clock: of the run, at the end of the round.
            noise: the standard errors of the scores, where they are known, shape ``(m,)``.

        Returns:
            The step size that was taken.
        """
        log, alpha = weights.log, 0.0
        if scores is not None:
            log, alpha = self.update.move(
                log,
                scores,
                round_index=clock.round_index,
                rounds=clock.rounds,
                fraction=clock.round_length / clock.horizon,
                noise=noise,
            )
        self.at_step(clock.steps_done)
        # Bounds that have become narrower hold also where the scores say nothing.
        if alpha > 0 or (self.constraints and not self._allows(weights)):
            log = constraining.apply(weights.names, log, self.constraints, step_size=alpha)
        weights.advance(log, steps=clock.round_length)
        return alpha
