"""What loops of every kind need of batches: the domain of each row, validation batches, weighed losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor

from mixwell.hypergradient.traces import ProjectedTraces
from mixwell.integrations.datasets import Interleaved
from mixwell.mixer.mixer import Mixer
from mixwell.mixer.row_batch import RowBatch
from mixwell.signals import Hypergradient
from mixwell.simplex.repetition import EpochCap

Labels = Callable[[Any], Sequence[Any]]
"""From a batch the domain of each row."""


def default_settings(given: Mapping[str, Any] | None, *, taken: set[str]) -> dict[str, Any]:
    """The settings of a mixer of mixed batches.

    Args:
        given: by the user.
        taken: settings that are not for the user to choose.

    Returns:
        Settings by keyword.

    Raises:
        ValueError: one was given that is taken.
    """
    settings = {"signal": Hypergradient(traces=ProjectedTraces()), **(given or {})}
    wrong = sorted(taken & set(settings))
    if wrong:
        raise ValueError(f"mixer: {wrong[0]} is chosen by the trainer or loop; leave it out")
    return settings


def settings_for(rows: Interleaved, given: Mapping[str, Any] | None, *, taken: set[str]) -> dict[str, Any]:
    """The settings of a mixer of interleaved rows, which begins with their weights.

    Args:
        rows: the training data.
        given: by the user.
        taken: settings that are not for the user to choose.

    Returns:
        Settings by keyword.

    Raises:
        ValueError: one was given that is taken, or that needs to know which rows were taken.
    """
    settings = default_settings(given, taken=taken)
    if any(isinstance(one, EpochCap) for one in settings.get("constraints", ())):
        raise ValueError("EpochCap has to be told which rows were taken, which is not done here; use Cap")
    return {"weights": {name: max(weight, 1e-12) for name, weight in rows.weights.items()}, **settings}


@final
class MixedBatches:
    """The mixed batch that is open, from before its forward pass to after its backward pass.

    Args:
        rows: the training data, which say how many rows of each domain to expect.
        labels: from a batch the domain of each row; by default its ``rows.column``, or the last part of a tuple.
    """

    def __init__(self, rows: Interleaved, labels: Labels | None) -> None:
        self._rows, self._labels = rows, labels
        self._opened = ExitStack()
        self._batch: RowBatch | None = None

    @property
    def is_open(self) -> bool:
        """Whether the layers are being watched."""
        return self._batch is not None

    def open(self, mixer: Mixer, batch: Any) -> None:
        """Watch the layers from now on.

        Args:
            mixer: of the loop.
            batch: about to be trained on.
        """
        labels = self._labels_of(batch)
        counts = self._rows.expected(len(labels))
        self._batch = self._opened.enter_context(mixer.batch(labels, counts=counts))

    def weighted_loss(self, losses: Tensor) -> Tensor:
        """The loss to differentiate.

        Args:
            losses: one for each row, or with more dimensions after the first, of which the mean is taken.

        Returns:
            One number: weighed by the rows' domains where a batch is open, else the mean.
        """
        return losses.mean() if self._batch is None else self._batch.weighted_loss(losses)

    def close(self) -> None:
        """The backward pass is done; the layers are left alone."""
        self._batch = None
        self._opened.close()

    def abandon(self, error: BaseException) -> None:
        """Leave the layers alone after an error.

        Args:
            error: what happened.
        """
        opened, self._opened, self._batch = self._opened, ExitStack(), None
        opened.__exit__(type(error), error, error.__traceback__)

    def _labels_of(self, batch: Any) -> Sequence[Any]:
        if self._labels is not None:
            return self._labels(batch)
        found = batch.get(self._rows.column) if isinstance(batch, Mapping) else batch[-1]
        if found is None:
            raise ValueError(
                f"the batch has no {self._rows.column!r} that names the domain of each row; keep it when "
                "collating, or give labels=f, where f(batch) returns it"
            )
        return found


@final
class ValidationBatches:
    """One batch after the other, from the beginning again at the end.

    Args:
        source: batches, such as a ``DataLoader``.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._rest: Iterator[Any] = iter(())
        self.taken = 0
        """How many were given."""

    def next(self) -> Any:
        """The next batch.

        Returns:
            As the source gives it.

        Raises:
            ValueError: there are none.
        """
        found = list(_first(self._rest))
        if not found:
            self._rest = iter(self._source)
            found = list(_first(self._rest))
        if not found:
            raise ValueError(
                "the validation set is empty; give batches that say what the weights should be good for"
            )
        self.taken += 1
        return found[0]

    def skip(self, count: int) -> None:
        """Pass over batches, so that a resumed run goes on where it was.

        Args:
            count: how many.
        """
        for _ in range(count):
            self.next()


def _first(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        return
