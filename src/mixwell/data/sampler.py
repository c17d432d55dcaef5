"""Chooses the rows of each domain in the next batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final, get_args

import numpy as np

from mixwell.data import apportionment
from mixwell.data.apportionment import Apportionment
from mixwell.data.shuffle import ShuffledCursor
from mixwell.data.streams import SequentialCursor
from mixwell.simplex.repetition import EpochCap
from mixwell.typing import Indices, Vector

Rule = Literal["weight", "equal"]


@final
class Sampler:
    """Draws batches by weights that change.

    Each domain has a cursor of its own over rows that are shuffled anew in every epoch. The counts of a batch
    follow shares with carried rounding (:class:`mixwell.data.apportionment.Apportionment`); ``sum_j w_j g_j`` is
    unbiased whatever the counts, so they are chosen for its variance:

    - ``"weight"``: ``n_j ~ w_j``, as an ordinary mixed batch has it;
    - ``"equal"``: the same number from each domain (the paper's).

    Args:
        sizes: rows by domain; ``None`` for a stream, where rows are numbered as they come.
        batch_size: rows of a batch, all domains together.
        least: rows that each domain has in every batch, so that it keeps a signal. ``None`` for a quarter of an
            equal share, at least one where there is room.
        cap: how often the rows of a domain may be seen. The sampler records the rows taken there, so give the same
            object to the mixer's constraints.

    Example:
        >>> sampler = Sampler({"web": 100, "code": 50}, 8, least=1)
        >>> {name: len(rows) for name, rows in sampler.draw(np.array([0.75, 0.25])).items()}
        {'web': 6, 'code': 2}
    """

    def __init__(
        self,
        sizes: Mapping[str, int | None],
        batch_size: int,
        *,
        rule: Rule = "weight",
        least: int | None = None,
        cap: EpochCap | None = None,
        seed: int = 0,
    ) -> None:
        if rule not in get_args(Rule):
            raise ValueError(
                f"the rule of the counts must be one of {', '.join(get_args(Rule))}, got {rule!r}"
            )
        self.names = tuple(sizes)
        self.batch_size = batch_size
        self.rule: Rule = rule
        if least is None:
            room = batch_size // max(len(sizes), 1)
            least = max(min(room, 1), room // 4)
        self.least = least
        self._counts = Apportionment(batch_size, len(sizes), least=least)
        self._cursors = {
            name: SequentialCursor() if size is None else ShuffledCursor(size, f"seed {seed}, {name}")
            for name, size in sizes.items()
        }
        self._cap = cap
        self._batches = 0
        self._open = np.ones(len(sizes))
        self._followed: tuple[bytes, ...] = ()
        self._shares, self._inclusion = np.empty(0), dict[str, float]()

    def shares(self, weights: Vector) -> Vector:
        """Return the share of each domain in the batches, from weights of shape ``(m,)``."""
        self._follow(weights)
        return self._shares.copy()

    def inclusion(self, weights: Vector) -> dict[str, float]:
        """Return the probability in (0, 1) with which a domain is in a batch, of those that are not in all."""
        self._follow(weights)
        return self._inclusion.copy()

    def draw(self, weights: Vector) -> dict[str, Indices]:
        """Return the indices of the next batch by domain; domains that are not in it are left out.

        Raises:
            ValueError: the caps allow no more rows of any domain.
        """
        most = None
        if self._cap is not None:
            most = np.minimum(self._cap.remaining, self.batch_size).astype(np.int64).tolist()
            if not any(most):
                raise ValueError("all domains are used up: their caps on epochs allow no more rows")
        self._follow(weights)
        numbers = self._counts.next(self._shares, most=most)
        rows = {
            name: cursor.take(count)
            for (name, cursor), count in zip(self._cursors.items(), numbers, strict=True)
            if count
        }
        self._batches += 1
        self._spend()
        return rows

    @property
    def taken(self) -> dict[str, int]:
        """The number of rows that were drawn so far, by domain."""
        return {name: cursor.taken for name, cursor in self._cursors.items()}

    @property
    def epochs(self) -> dict[str, float]:
        """How often the rows of each domain were seen, where their number is known."""
        return {
            name: cursor.taken / cursor.size
            for name, cursor in self._cursors.items()
            if cursor.size is not None
        }

    def state(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain values."""
        return {
            "batch_size": self.batch_size,
            "sizes": {name: cursor.size for name, cursor in self._cursors.items()},
            "taken": self.taken,
            "batches": self._batches,
            "carry": list(self._counts.carry),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another sampler of the same domains, in the same order, stopped."""
        sizes = {name: cursor.size for name, cursor in self._cursors.items()}
        if list(state["sizes"].items()) != list(sizes.items()):
            raise ValueError(f"the data have changed: rows by domain were {state['sizes']}, are {sizes}")
        if state["batch_size"] != self.batch_size:
            raise ValueError(f"a batch had {state['batch_size']} rows, and now has {self.batch_size}")
        for name, cursor in self._cursors.items():
            cursor.taken = int(state["taken"][name])
        self._batches = int(state["batches"])
        self._spend()
        self._counts.carry = [float(rest) for rest in state["carry"]]

    def _follow(self, weights: Vector) -> None:
        """Compute the shares and probabilities, unless the weights and bounds are unchanged."""
        weights = np.asarray(weights, dtype=np.float64)
        high = self._open if self._cap is None else self._cap.bounds(self.names)[1]
        followed = weights.tobytes(), high.tobytes()
        if followed == self._followed:
            return
        equal = np.full(len(self.names), 1 / len(self.names))
        shares = equal if self.rule == "equal" else weights
        low = np.full(len(shares), self.least / self.batch_size)
        self._shares = apportionment.within(shares, low, high)
        # A domain that is used up is in no batch, so that any number below one will do.
        often = {
            name: float(n) or 0.5 for name, n in zip(self.names, self.batch_size * self._shares, strict=True)
        }
        self._inclusion = {name: n for name, n in often.items() if n < 1 - apportionment.ROUNDING}
        self._followed = followed

    def _spend(self) -> None:
        if self._cap is not None:
            self._cap.record_usage(self.taken, steps_done=self._batches)
