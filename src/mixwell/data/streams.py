"""Rows that come one after the other, and are read again from where a run stopped."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, final

import numpy as np
from typing_extensions import override

from mixwell.data.shuffle import shuffled
from mixwell.data.sources.base import digest_of
from mixwell.typing import Indices
from mixwell.utils.user_warnings import warn_user

# One row could be the same by chance where a shuffle buffer was filled anew.
_COMPARED = 8


@final
class SequentialCursor:
    """The cursor of a stream, for a sampler: rows are numbered as they come.

    Example:
        >>> SequentialCursor(taken=5).take(3).tolist()
        [5, 6, 7]
    """

    size = None

    def __init__(self, *, taken: int = 0) -> None:
        self.taken = taken

    def take(self, count: int) -> Indices:
        """Return the numbers of the next rows, shape ``(count,)``."""
        self.taken += count
        return np.arange(self.taken - count, self.taken)


class Reader(ABC):
    """Returns rows without end, and resumes where it was saved."""

    @property
    @abstractmethod
    def taken(self) -> int:
        """The number of rows that were returned."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """The number of complete passes."""

    @abstractmethod
    def take(self, count: int) -> list[Any]:
        """Return the next rows; raise ``ValueError`` where there are none."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain values."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another reader stopped; raise ``ValueError`` where the rows are others."""


@final
class Stream(Reader):
    """The rows of an iterable, from the beginning again when it ends; it resumes exactly where it was saved.

    A source that has ``state_dict`` and ``load_state_dict``, such as a streamed Hugging Face dataset, is resumed
    by them. Some of these lose rows, such as those in a shuffle buffer; so the next rows are compared with those
    that were next when the state was saved. Where they differ, or the source has no state, the rows before
    them are read again and skipped.

    Shuffling by blocks needs no more than that: a block is read, and its rows come in an order that its number
    selects.

    Args:
        source: can be iterated over more than once. Where it has ``set_epoch``, it is called with the number of
            the pass.
        name: for messages and the order of the rows.
        block: rows that are shuffled together; 1 leaves them in order.
        key: chooses the orders.

    Example:
        >>> stream = Stream(["a", "b", "c"], "letters")
        >>> stream.take(4)
        ['a', 'b', 'c', 'a']
    """

    def __init__(self, source: Iterable[Any], name: str, *, block: int = 1, key: str = "") -> None:
        if isinstance(source, Iterator):
            raise ValueError(f"{name}: an iterator can be read once only; give the dataset that makes it")
        if block < 1:
            raise ValueError(f"{name}: a block must have at least 1 row, got {block}")
        self._source: Any = source
        self._name, self._size, self._key = name, block, f"{key}, {name}"
        self._taken = self._passes = 0
        self._open(source)

    @property
    @override
    def taken(self) -> int:
        return self._taken

    @property
    @override
    def passes(self) -> int:
        # Reads ahead to see whether there are more rows.
        if not self._left:
            self._read_block(saved=True)
        return self._passes + (not self._left and self._before > 0)

    @override
    def take(self, count: int) -> list[Any]:
        return [self._next() for _ in range(count)]

    @override
    def state(self) -> dict[str, Any]:
        # Reads some rows ahead, which are kept.
        if not self._left:
            self._read_block(saved=True)
        return {
            "taken": self.taken,
            "passes": self._passes,
            "before": self._before,
            "used": len(self._block) - len(self._left),
            "next": self._mark(),
            "source": self._saved,
        }

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._taken, self._passes = int(state["taken"]), int(state["passes"])
        before, has_state = int(state["before"]), state["source"] is not None
        if has_state:
            # A copy, since the source may begin with what was loaded from now on.
            source = copy.deepcopy(self._source)
            source.load_state_dict(copy.deepcopy(state["source"]))
            self._open(source, before=before)
        if not has_state or self._mark() != state["next"]:
            if has_state:
                warn_user(
                    f"{self._name} does not resume where it was saved (a shuffle buffer is not saved), so "
                    f"its first {before:,} rows are read again and skipped; shuffle by blocks instead"
                )
            self._open(self._source, before=before, skipped=before)
        if self._mark() != state["next"]:
            raise ValueError(
                f"{self._name}: the rows from {before} on are not those that were there when the run was saved; "
                "put the data back as they were"
            )
        del self._left[len(self._left) - int(state["used"]) :]

    def _open(self, source: Any, *, before: int = 0, skipped: int = 0) -> None:
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._passes)
        self._opened, self._rows = source, iter(source)
        for _ in islice(self._rows, skipped):
            pass
        self._before = before
        self._block: list[Any] = []
        self._read_block(saved=True)

    def _next(self) -> Any:
        if not self._left:
            self._read_block(saved=self._size > 1)
        if not self._left:
            if not self._before:
                raise ValueError(f"{self._name}: there are no rows to take")
            self._passes += 1
            self._open(self._source)
            return self._next()
        self._taken += 1
        return self._left.pop()

    def _read_block(self, *, saved: bool) -> None:
        """Read the rows that come next.

        Args:
            saved: whether to keep the source's state before them, which takes longer than a row.
        """
        self._before += len(self._block)
        # Before the first row the state of a Hugging Face dataset is still that of the pass before.
        can = saved and self._before and hasattr(self._opened, "state_dict")
        self._saved = copy.deepcopy(self._opened.state_dict()) if can else None
        self._block = list(islice(self._rows, _COMPARED if saved and self._size == 1 else self._size))
        self._marked: str | None = None
        order = range(len(self._block))
        if self._size > 1 and len(self._block) > 1:
            key = f"{self._key}, pass {self._passes}, row {self._before}"
            order = shuffled(np.arange(len(self._block)), len(self._block), key).tolist()
        # In reverse, as rows are taken from the end.
        self._left = [self._block[place] for place in order][::-1]

    def _mark(self) -> str:
        """Return a digest of the rows that were read together, by which a resumed stream finds its place."""
        if self._marked is None:
            self._marked = digest_of([json.dumps(row, default=_plain) for row in self._block[:_COMPARED]])
        return self._marked


def _plain(value: Any) -> Any:
    """Return the values of tensors and arrays for JSON, and the type of other objects."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
