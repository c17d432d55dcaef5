"""How often the rows of a small domain are seen: limits on its weight.

A row that is seen again teaches less than a new one, and one that is seen too often is learned by heart: the loss
on it falls, and that on other rows of its kind rises. A hypergradient sees what another repetition does within a
round, but not that it leaves less for later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

import numpy as np

from mixwell.simplex.constraints import Bounds, Constraint
from mixwell.typing import Vector

EPOCHS_AHEAD = 16.0
"""How often the rest of a run may show the rows of a domain by default. Published: the value of a repeated token
falls to 1/e in 15.4 repetitions (Muennighoff et al. 2023, arXiv:2305.16264)."""


@final
class EpochPace(Constraint):
    r"""No domain gets more weight than would show its rows a given number of times in the rest of the run.

    ``w_j <= epochs * n_j / min(B (N - t), sum_i n_i)`` after t of N steps of B rows, with the ``n_j`` rows of
    domain j. Early in the run a small domain is held back and later it is let go, so that it is not used up where
    it counts least: what training does early is mostly forgotten at the end, but a row that was learned by heart
    early teaches nothing late. Where all rows together are shown several times anyway, the limit is ``epochs``
    times the domain's part of all rows.

    It gives way to floors and other bounds. What was taken so far does not count (:class:`EpochCap` counts it).

    Args:
        rows: that each domain has.
        epochs: how often, at least 1.
        batch_size: B, rows of a step.
        budget: N, training steps.

    Raises:
        ValueError: a number is out of range.

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

    soft: ClassVar[bool] = True

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

    def at_step(self, steps_done: int) -> None:
        """Set the number of steps that are left.

        Args:
            steps_done: t.
        """
        self._left = self._batch_size * max(self._budget - steps_done, 0)

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """``[0, epochs n_j / min(B (N - t), sum n)]``; after the last step ``[0, 1]``.

        Args:
            names: the domains.

        Returns:
            Lower and upper bounds, shape ``(m,)`` each.

        Raises:
            ValueError: a domain's number of rows was not given.
        """
        missing = [name for name in names if name not in self._rows]
        if missing:
            raise ValueError(f"EpochPace must have the rows of all domains; {', '.join(missing)} is missing")
        rows = np.array([self._rows[name] for name in names], dtype=np.float64)
        shown = min(float(self._left), float(rows.sum()))
        high = np.minimum(1.0, self.epochs * rows / shown) if shown else np.ones(len(names))
        return np.zeros(len(names)), high


@final
class EpochCap(Constraint):
    """No domain gets more weight than what is left of its rows can serve until the end.

    ``w_j <= left_j / (B * steps left)``, where ``left_j`` counts the rows that may still be taken before domain j
    was seen ``epochs_j`` times. Whoever takes the rows says so (:meth:`spend`) before each update. Rows that are
    used up cannot be had, so floors and caps give way to this one.

    Args:
        rows: that each domain has.
        epochs: how often its rows may be seen; one number for all domains, or numbers by domain (the others
            have no cap).
        batch_size: B, rows of a step.
        budget: N, training steps.

    Raises:
        ValueError: a number is not positive, a domain is unknown, or all rows together are too few for the
            budget.

    Example:
        >>> EpochCap({"a": 100, "b": 1000}, 1, batch_size=10, budget=50).bounds(["a", "b"])[1].tolist()
        [0.202, 1.0]
    """

    scarce: ClassVar[bool] = True

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
        self.spend({}, steps_done=0)
        if self.left.sum() < batch_size * budget:
            raise ValueError(
                f"{budget} steps of {batch_size} rows need {budget * batch_size:,} rows, but with their caps on "
                f"epochs the domains give {int(self.left.sum()):,}; train for fewer steps, or raise the epochs"
            )

    def __repr__(self) -> str:
        return f"EpochCap({self._rows}, {self._epochs}, batch_size={self._batch_size}, budget={self._budget})"

    def spend(self, taken: Mapping[str, int], *, steps_done: int) -> None:
        """Tell how many rows were taken so far.

        Args:
            taken: by domain, from the beginning; none where it is not named.
            steps_done: training steps so far.
        """
        allowed = [rows * self._epochs.get(name, np.inf) for name, rows in self._rows.items()]
        seen = np.array([taken.get(name, 0) for name in self._rows], dtype=np.float64)
        self.left = np.maximum(np.floor(allowed) - seen, 0.0)
        """Rows that each domain may still give; infinite where it has no cap. Shape ``(m,)``."""
        self._needed = self._batch_size * max(self._budget - steps_done, 0)

    def bounds(self, names: Sequence[str]) -> tuple[Vector, Vector]:
        """``[0, left / needed]``; when nothing is needed any more, ``[0, 1]``.

        Args:
            names: the domains.

        Returns:
            Lower and upper bounds, shape ``(m,)`` each.
        """
        if not self._needed:
            return np.zeros(len(names)), np.ones(len(names))
        by_name = dict(zip(self._rows, self.left, strict=True))
        # Counts are whole, so a domain may be a row ahead of its weight; that must not close its cap.
        high = [min(1.0, (by_name[name] + 1) / self._needed) if by_name[name] else 0.0 for name in names]
        return np.zeros(len(names)), np.array(high)
