"""The outer step: from the scores of a round to new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from mixwell.simplex.constraints import Constraint, apply_constraints, constrain, limits
from mixwell.simplex.rounds import RoundClock
from mixwell.simplex.updates import MirrorDescent, RoundContext, Update
from mixwell.simplex.weights import TINY, Weights
from mixwell.typing import Vector


@final
class WeightUpdater:
    """An update on a constrained simplex.

    Args:
        update: a number is the step size of mirror descent, ``None`` is ``MirrorDescent("auto")``.
    """

    def __init__(self, update: Update | float | None, constraints: Sequence[Constraint]) -> None:
        if not isinstance(update, Update):
            update = MirrorDescent("auto" if update is None else update)
        self.update = update
        self.update.reset()
        self.constraints = tuple(constraints)

    def initial_weights(
        self, domains: Sequence[str], initial: Mapping[str, float] | Sequence[float] | None
    ) -> Weights:
        """Return the nearest weights to the initial ones that the constraints allow.

        Args:
            initial: positive numbers, or ``None`` for uniform.
        """
        self.at_step(0)  # the constraints may have served another run
        return self.nearest_weights(domains, initial)

    def nearest_weights(
        self, domains: Sequence[str], given: Mapping[str, float] | Sequence[float] | None
    ) -> Weights:
        """Return the nearest weights to given ones that the constraints allow now."""
        weights = Weights(domains, given)
        if not self.constraints:
            return weights
        allowed = constrain(weights.names, weights.log, self.constraints)
        return Weights(weights.names, np.maximum(allowed, TINY).tolist())

    def limits(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Return by domain the least and the greatest weight that the constraints allow now."""
        low, high = limits(names, self.constraints)
        return dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))

    def set_constraints(
        self, names: Sequence[str], constraints: Sequence[Constraint], *, steps_done: int
    ) -> None:
        """Replace the constraints, which apply from the next update on.

        Raises:
            ValueError: no mixture satisfies them all; nothing is changed.
        """
        given = tuple(constraints)
        for one in given:
            if not isinstance(one, Constraint):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"constraints must be a list of constraints such as Floor(0.02), got {one!r}"
                )
            one.at_step(steps_done)
        limits(names, given)
        self.constraints = given

    def at_step(self, steps_done: int) -> None:
        """Set the number of finished training steps of the constraints."""
        for constraint in self.constraints:
            constraint.at_step(steps_done)

    def apply(
        self, weights: Weights, scores: Vector | None, clock: RoundClock, *, noise: Vector | None = None
    ) -> float:
        """End a round with one step against the scores, and return the step size.

        Args:
            weights: are advanced.
            scores: finite, shape ``(m,)``; ``None`` leaves the weights unchanged.
            clock: at the end of the round.
            noise: the standard errors of the scores, where they are known, shape ``(m,)``.
        """
        log, alpha = weights.log, 0.0
        if scores is not None:
            # The scores of a longer last round are larger, and need no step longer than that of a full one.
            fraction = min(1.0, clock.round_length / clock.horizon)
            context = RoundContext(clock.round_index, clock.rounds, fraction, noise)
            log, alpha = self.update.step(log, scores, context)
        self.at_step(clock.steps_done)
        # Bounds that have become narrower apply even where there are no scores.
        if alpha > 0 or (self.constraints and not self._allows(weights)):
            log = apply_constraints(weights.names, log, self.constraints, step_size=alpha)
        weights.advance(log, steps=clock.round_length)
        return alpha

    def _allows(self, weights: Weights) -> bool:
        low, high = limits(weights.names, self.constraints)
        return bool(((weights.values >= low - 1e-12) & (weights.values <= high + 1e-12)).all())
