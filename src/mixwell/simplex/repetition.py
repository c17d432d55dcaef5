"""Limits on how often the rows of a small domain are repeated.

A repeated row teaches less than a new one, and one that is repeated too often is memorized: the loss on it falls,
and the loss on similar rows rises. A hypergradient includes the effect of another repetition within a round, but
not that it leaves less for later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, final

import numpy as np
from typing_extensions import override

from mixwell.simplex.constraints import Bounds, Constraint
from mixwell.typing import Vector

EPOCHS_AHEAD = 16.0
"""The default of :class:`EpochPace`. The value of a repeated token falls to 1/e in 15.4 repetitions (Muennighoff
et al. 2023, arXiv:2305.16264)."""


@final
class EpochPace(Constraint):
    """Limit each weight so that the rest of the run would show the rows of a domain at most ``epochs`` times.

    ``w_j <= epochs * n_j / min(B (N - t), sum_i n_i)`` after t of N steps of B rows, with the ``n_j`` rows of
    domain j. A small domain is held back early in the run and released later, so that it is not used up where it
    matters least: the effect of early training is mostly forgotten at the end, but a row that was memorized early
    teaches nothing late. Where all rows together are shown several times anyway, the limit is ``epochs`` times the
    domain's fraction of all rows.

    It yields to floors and other bounds, and does not count the rows taken so far (:class:`EpochCap` does).

    Args:
        rows: the number of rows of each domain.
        epochs: at least 1.
        batch_size: B, rows per step.
        budget: N, training steps.

    Example:
        >>> pace = EpochPace({"a": 100, "b": 10_000}, 4, batch_size=10, budget=200)
        >>> pace.bounds(["a", "b"])[1].tolist()
        [0.2, 1.0]
        >>> pace.at_step(150)
        >>> pace.bounds(["a", "b"])[1].tolist()
        [0.8, 1.0]

    References:
        Muennighoff et al. 2023, Scaling data-constrained language models.
    """

    is_soft: ClassVar[bool] = True

    def __init__(
        self, rows: Mapping[str, int], epochs: float = EPOCHS_AHEAD, *, batch_size: int, budget: int
    ) -> None:
        if not (math.isfinite(epochs) and epochs >= 1):
            raise ValueError(f"epochs must be a finite number of at least 1, got {epochs}")
        if batch_size < 1 or budget < 1:
            raise ValueError(f"batch_size and budget must be at least 1, got {batch_size} and {budget}")
        empty = [name for name, count in rows.items() if count < 1]
        if empty:
            raise ValueError(f"{', '.join(empty)} must have rows, got {min(rows.values())}")
        self._rows, self.epochs = dict(rows), float(epochs)
        self._batch_size, self._budget = int(batch_size), int(budget)
        self.at_step(0)

    def __repr__(self) -> str:
        return f"EpochPace({self._rows}, {self.epochs}, batch_size={self._batch_size}, budget={self._budget})"

    @override
    def at_step(self, steps_done: int) -> None:
        self._rows_left = self._batch_size * max(self._budget - steps_done, 0)

    @override
    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """Return ``[0, epochs n_j / min(B (N - t), sum n)]``; after the last step ``[0, 1]``."""
        missing = [name for name in names if name not in self._rows]
        if missing:
            raise ValueError(f"EpochPace must have the rows of all domains; {', '.join(missing)} is missing")
        rows = np.array([self._rows[name] for name in names], dtype=np.float64)
        shown = min(float(self._rows_left), float(rows.sum()))
        high = np.minimum(1.0, self.epochs * rows / shown) if shown else np.ones(len(names))
        return np.zeros(len(names)), high


def epoch_caps(constraints: Iterable[Constraint]) -> list[EpochCap]:
    """Return the caps on epochs among constraints, which a loader must know to count the rows that it takes."""
    return [one.epoch_cap for one in constraints if one.epoch_cap is not None]


@final
class EpochCap(Constraint):
    """Limit each weight to the rows that a domain can still provide until the end of the run.

    ``w_j <= remaining_j / (B * steps left)``, where ``remaining_j`` counts the rows that may still be taken before
    domain j was seen ``epochs_j`` times. The sampler reports the rows that it takes (:meth:`record_usage`) before
    each update. This is a supply limit, so it overrides floors and caps.

    Args:
        rows: the number of rows of each domain.
        epochs: how often its rows may be seen; one number for all domains, or numbers by domain (the others
            have no cap).
        batch_size: B, rows per step.
        budget: N, training steps.

    Raises:
        ValueError: a number is not positive, a domain is unknown, or all rows together are too few for the
            budget.

    Example:
        >>> EpochCap({"a": 100, "b": 1000}, 1, batch_size=10, budget=50).bounds(["a", "b"])[1].tolist()
        [0.202, 1.0]
    """

    is_supply_limit: ClassVar[bool] = True

    def __init__(self, rows: Mapping[str, int], epochs: Bounds, *, batch_size: int, budget: int) -> None:
        by_name = epochs if isinstance(epochs, Mapping) else dict.fromkeys(rows, epochs)
        for name, often in by_name.items():
            if name not in rows:
                raise ValueError(f"epochs names unknown domain {name!r}; the domains are {', '.join(rows)}")
            if not often > 0:
                raise ValueError(f"the epochs of {name!r} must be positive, got {often}")
        self._rows = dict(rows)
        self._epochs = dict(by_name)
        self._batch_size, self._budget = batch_size, budget
        self.record_usage({}, steps_done=0)
        if self.remaining.sum() < batch_size * budget:
            raise ValueError(
                f"{budget} steps of {batch_size} rows need {budget * batch_size:,} rows, but with their caps on "
                f"epochs the domains give {int(self.remaining.sum()):,}; train for fewer steps or raise the epochs"
            )

    def __repr__(self) -> str:
        return f"EpochCap({self._rows}, {self._epochs}, batch_size={self._batch_size}, budget={self._budget})"

    @property
    @override
    def epoch_cap(self) -> EpochCap:
        return self

    def record_usage(self, taken: Mapping[str, int], *, steps_done: int) -> None:
        """Record how many rows were taken since the start of the run.

        Args:
            taken: by domain; zero where it is not named.
        """
        allowed = [rows * self._epochs.get(name, np.inf) for name, rows in self._rows.items()]
        seen = np.array([taken.get(name, 0) for name in self._rows], dtype=np.float64)
        self.remaining = np.maximum(np.floor(allowed) - seen, 0.0)
        """Rows that each domain may still provide, shape ``(m,)``; infinite where it has no cap."""
        self._needed = self._batch_size * max(self._budget - steps_done, 0)

    @override
    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """Return ``[0, remaining / needed]``; when nothing is needed any more, ``[0, 1]``."""
        if not self._needed:
            return np.zeros(len(names)), np.ones(len(names))
        by_name = dict(zip(self._rows, self.remaining, strict=True))
        # Row counts are integers, so a domain may be one row ahead of its weight, which must not exceed its cap.
        high = [min(1.0, (by_name[name] + 1) / self._needed) if by_name[name] else 0.0 for name in names]
        return np.zeros(len(names)), np.array(high)
