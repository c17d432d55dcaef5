"""Rounds: when one begins and ends, which of its steps are traced, and where validation gradients are taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import numpy as np

from mixwell.utils.user_warnings import warn_user

POINTS, SPAN = 8, 0.5
"""The default number of validation gradients in a round, and the part of the round, at its end, that has them."""


def validation_points(
    length: int, *, points: int = POINTS, span: float = SPAN, window: int | None = None
) -> tuple[int, ...]:
    """Return the steps of a round after which a validation gradient is due, evenly spaced in its later part.

    Args:
        points: the number of gradients; fewer where that part of the round has fewer steps.
        span: the part of the round, at its end, in (0, 1].
        window: the greatest number of last steps that this part may have.

    Returns:
        Increasing; the last one is ``length``.

    Example:
        >>> validation_points(84, points=4), validation_points(3, points=4), validation_points(84, points=1)
        ((53, 63, 74, 84), (2, 3), (84,))
    """
    later = min(max(1, math.ceil(span * length)), window or length)
    count = min(points, later)
    return tuple(length - later + math.ceil(later * (i + 1) / count) for i in range(count))


TRACED_STEPS = 64
"""About the number of steps of a round that are traced, where settings leave it open."""


def trace_interval(length: int) -> int:
    """Return s, where every s-th step of a round is traced: about 64 steps, and all of a short round.

    Example:
        >>> trace_interval(42), trace_interval(100), trace_interval(304)
        (1, 2, 5)
    """
    return max(1, (2 * length + TRACED_STEPS) // (2 * TRACED_STEPS))


@final
@dataclass(frozen=True)
class ObservedSteps:
    """Steps of a round, counted from 0.

    Args:
        steps: in increasing order.
        interval: the number of steps that each of them stands for.
    """

    steps: Sequence[int]
    interval: int = 1

    def __contains__(self, step: int) -> bool:
        return step in self.steps

    def __len__(self) -> int:
        return len(self.steps)


@lru_cache(maxsize=16)
def traced_steps(
    round_index: int, length: int, *, every: int | Literal["auto"] = "auto", window: int | None = None
) -> ObservedSteps:
    """Return the steps of a round that are traced: a random one of every s in succession.

    A trace is a sum over the steps, and a sum over these, times s, has the same expectation. It does not depend on
    how a domain's rows are distributed over the steps; with every s-th step, a domain that is in every s-th batch
    would be seen always or never. The steps are the same on every process and after resuming.

    Args:
        every: s; ``"auto"`` is :func:`trace_interval`.
        window: the number of last steps that may be traced, ``None`` for all.

    Example:
        >>> traced_steps(0, 5).steps, len(traced_steps(0, 304)), traced_steps(0, 12, every=4).steps
        (range(0, 5), 60, (1, 7, 9))
    """
    count = length if window is None else min(window, length)
    interval = min(trace_interval(count) if every == "auto" else every, max(count, 1))
    begins = range(length - count, length, interval)
    if interval == 1:
        return ObservedSteps(begins)
    drawn = np.random.default_rng((round_index, interval)).integers(interval, size=len(begins)).tolist()
    steps = (begin + offset for begin, offset in zip(begins, drawn, strict=True))
    return ObservedSteps(tuple(step for step in steps if step < length), interval)


VALIDATION_FRACTION = 0.05
"""The rows of all validation gradients of a round over those of its traced steps, where settings leave it open."""


def validation_rows(batch_rows: int, *, steps: int, points: int) -> int:
    """Return the rows of one validation gradient; those of a round take 5% of the rows of its traced steps.

    A long round is traced in about 64 steps (:func:`trace_interval`), and its validation gradients are no larger
    than those of a round of that length: they take 5% of a short round and 1% of 300 steps. A round of fewer than
    twenty steps takes one training batch in all, since a smaller gradient is mostly noise.

    Args:
        batch_rows: rows of a training step.
        steps: steps of a round.
        points: validation gradients in a round.

    Example:
        >>> validation_rows(32, steps=84, points=8), validation_rows(32, steps=1, points=1)
        (16, 32)
        >>> validation_rows(32, steps=304, points=8)
        12
    """
    traced = steps / trace_interval(steps)
    return max(1, int(batch_rows * max(VALIDATION_FRACTION * traced, 1.0) / max(points, 1)))


def round_count(steps: int, horizon: int) -> int:
    """Return the number of rounds that a :class:`RoundClock` divides the steps after the warm-up into.

    ``floor(steps / T + 1/2)``, at least 1.

    Example:
        >>> round_count(400, 49), round_count(1000, 42), round_count(3, 10)
        (8, 24, 1)
    """
    return max(1, (2 * steps + horizon) // (2 * horizon))


def _next_length(rest: int, horizon: int) -> int:
    """Return the length of the next of the rounds that ``rest`` steps are divided into."""
    return rest if round_count(rest, horizon) == 1 else horizon


@final
class RoundClock:
    """Count training steps and divide them into rounds.

    The first ``warmup`` steps belong to no round. Then come rounds of ``horizon`` steps. Where the horizon does
    not divide the steps of the budget, a remainder of at least half of it is a short last round; a smaller one is
    added to the round before, since the scores of a few steps are mostly noise. Steps beyond the budget continue
    in rounds of ``horizon`` steps, with a warning.

    Args:
        horizon: the number T of steps in a round.
        budget: the number N of steps, where it is known.
        warmup: the number of first steps in no round.

    Example:
        >>> clock = RoundClock(4, budget=10, warmup=1)
        >>> lengths = []
        >>> for _ in range(10):
        ...     clock.tick()
        ...     if clock.round_done:
        ...         lengths.append(clock.round_length)
        ...         clock.next_round()
        >>> lengths
        [4, 5]
    """

    def __init__(self, horizon: int, *, budget: int | None, warmup: int) -> None:
        if warmup < 0 or int(warmup) != warmup:
            raise ValueError(f"warmup must be a whole number of steps, not negative, got {warmup}")
        if budget is not None and warmup >= budget:
            raise ValueError(f"a warmup of {warmup} steps leaves no step of the budget of {budget} steps")
        self.horizon = horizon
        self.budget = budget
        self.warmup = int(warmup)
        self.steps_done = 0
        self.round_index = 0
        self.round_start = self.warmup
        self._warned = False

    def __repr__(self) -> str:
        of = "" if self.rounds is None else f" of {self.rounds}"
        inside = self.steps_in_round
        return f"step {self.steps_done}, round {self.round_index}{of}, {inside} of {self.round_length} steps"

    @property
    def rounds(self) -> int | None:
        """The number of rounds in the budget."""
        return None if self.budget is None else round_count(self.budget - self.warmup, self.horizon)

    @property
    def round_length(self) -> int:
        """The number of steps in this round."""
        if self.budget is None or self.round_start >= self.budget:
            return self.horizon
        return _next_length(self.budget - self.round_start, self.horizon)

    @property
    def in_round(self) -> bool:
        """Whether the next step belongs to a round (and not to the warm-up)."""
        return self.steps_done >= self.warmup

    @property
    def steps_in_round(self) -> int:
        """Steps of this round so far."""
        return max(0, self.steps_done - self.round_start)

    @property
    def remaining(self) -> int:
        """Steps until the round ends."""
        return self.round_start + self.round_length - self.steps_done

    @property
    def round_done(self) -> bool:
        """Whether the round has ended and the next has not begun."""
        return self.remaining == 0

    @property
    def finished(self) -> bool:
        """Whether the number of steps equals the budget."""
        return self.steps_done == self.budget

    def tick(self) -> None:
        """Count one training step."""
        if self.budget is not None and self.steps_done >= self.budget and not self._warned:
            self._warned = True
            warn_user(
                f"training continues after the budget of {self.budget} steps; rounds of {self.horizon} steps "
                "follow"
            )
        self.steps_done += 1

    def next_round(self) -> None:
        """Begin the next round, after the update of the weights."""
        self.round_index += 1
        self.round_start = self.steps_done

    def state(self) -> dict[str, int]:
        """Return the counters."""
        return {
            "steps_done": self.steps_done,
            "round_index": self.round_index,
            "round_start": self.round_start,
        }

    def load_state(self, state: dict[str, int]) -> None:
        """Restore the result of :meth:`state`."""
        self.steps_done = int(state["steps_done"])
        self.round_index = int(state["round_index"])
        self.round_start = int(state["round_start"])
