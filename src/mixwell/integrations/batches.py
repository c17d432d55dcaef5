"""Parts of all training loops: the open batch, validation batches, and settings of a mixer of mixed batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor
from torch.utils.data import IterableDataset

from mixwell.data.loader import MixtureLoader
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.hypergradient.traces import ProjectedTraces
from mixwell.mixer.batch import MixtureBatch
from mixwell.mixer.mixer import Mixer
from mixwell.mixer.scopes import BatchScope
from mixwell.signals import Hypergradient
from mixwell.simplex.repetition import epoch_caps

Labels = Callable[[Any], Sequence[Any]]
"""Returns the domain of each row of a batch."""
MixtureData = MixtureLoader | MixtureDataset
"""Training data that follow weights."""


def default_settings(given: Mapping[str, Any] | None, *, reserved: set[str]) -> dict[str, Any]:
    """Return the settings of a mixer of mixed batches, by keyword; refuse those that the trainer chooses."""
    settings = {"signal": Hypergradient(traces=ProjectedTraces()), **(given or {})}
    wrong = sorted(reserved & set(settings))
    if wrong:
        raise ValueError(f"mixer: {wrong[0]} is chosen by the trainer or loop; leave it out")
    return settings


def settings_for(data: MixtureData, given: Mapping[str, Any] | None, *, reserved: set[str]) -> dict[str, Any]:
    """Return the settings of a mixer of some training data; with a dataset the weights begin with its own."""
    settings = default_settings(given, reserved=reserved)
    if isinstance(data, MixtureLoader):
        return settings
    if epoch_caps(settings.get("constraints", ())):
        raise ValueError(
            "EpochCap needs to know which rows were taken; give a MixtureLoader with it, or use Cap"
        )
    return {"weights": {name: max(weight, 1e-12) for name, weight in data.weights.items()}, **settings}


@final
class FollowedBatches(IterableDataset[Any]):
    """The rows of a loader's batches without end, for a trainer that iterates over them itself."""

    def __init__(self, loader: MixtureLoader) -> None:
        self.loader = loader
        self.mixer: Mixer | None = None
        """The mixer to follow; the trainer sets it when training begins."""
        self.skipped = 0
        """The number of batches that a resumed trainer fetches and discards first; they are empty."""
        self._fetched: deque[MixtureBatch] = deque()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.skipped):
            yield {}
        self.skipped = 0
        if self.mixer is None:
            raise ValueError("there are no batches before training has begun: their domains follow the mixer")
        self._fetched.clear()
        for batch in self.loader.follow(self.mixer):
            self._fetched.append(batch)
            yield batch.rows

    def next(self) -> MixtureBatch:
        """Return the batch that the trainer trains on next, among those that it has fetched."""
        return self._fetched.popleft()


@final
class OpenBatch:
    """The mixed batch that is open, from before its forward pass to after its backward pass.

    Args:
        data: the training data, from which the expected counts follow.
        labels: from a batch of a :class:`MixtureDataset` the domain of each row; by default its ``data.column``,
            or the last part of a tuple.
    """

    def __init__(self, data: MixtureData, labels: Labels | None) -> None:
        self._data, self._labels = data, labels
        self._stack = ExitStack()
        self._scope: BatchScope | None = None
        self._scale = 1

    @property
    def is_open(self) -> bool:
        """Whether the layers are captured."""
        return self._scope is not None

    def open(self, mixer: Mixer, batch: Any, *, loss_divisor: int) -> None:
        """Capture the layers from now on.

        Args:
            batch: a :class:`mixwell.MixtureBatch`, or the batch of a ``DataLoader``.
            loss_divisor: by which the trainer divides the loss of each micro-batch (gradient accumulation).
        """
        if isinstance(batch, MixtureBatch):
            # Its loss is already a part of the step's, so that the trainer's division is undone.
            self._scale = loss_divisor
            scope = mixer.batch(batch)
        else:
            assert isinstance(self._data, MixtureDataset)
            labels = self._labels_of(self._data.column, batch)
            scope = mixer.batch(labels, expected_counts=self._data.expected_counts(len(labels)))
        self._scope = self._stack.enter_context(scope)

    def weighted_loss(self, losses: Tensor) -> Tensor:
        """Return the loss to differentiate: weighted by the rows' domains where a batch is open, else the mean.

        Args:
            losses: one for each row, or with more dimensions after the first, over which the mean is taken.
        """
        if self._scope is None:
            return losses.mean()
        loss = self._scope.weighted_loss(losses)
        return loss if self._scale == 1 else loss * self._scale

    def close(self) -> None:
        """End the batch, after its backward pass."""
        self._scope = None
        self._stack.close()

    def abandon(self, error: BaseException) -> None:
        """Remove the hooks after an error."""
        stack, self._stack, self._scope = self._stack, ExitStack(), None
        stack.__exit__(type(error), error, error.__traceback__)

    def _labels_of(self, column: str, batch: Any) -> Sequence[Any]:
        if self._labels is not None:
            return self._labels(batch)
        found = batch.get(column) if isinstance(batch, Mapping) else batch[-1]
        if found is None:
            raise ValueError(
                f"the batch has no {column!r} that names the domain of each row; keep it when "
                "collating, or give labels=f, where f(batch) returns it"
            )
        return found


@final
class ValidationBatches:
    """The batches of an iterable, such as a ``DataLoader``, from the beginning again at the end."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._rest: Iterator[Any] = iter(())
        self.taken = 0
        """The number of batches so far."""

    def next(self) -> Any:
        """Return the next batch."""
        for source in (self._rest, self._source):
            self._rest = iter(source)
            for batch in self._rest:
                self.taken += 1
                return batch
        raise ValueError(
            "the validation set is empty; give batches that say what the weights should be good for"
        )

    def skip(self, count: int) -> None:
        """Skip batches, so that a resumed run continues where it was."""
        for _ in range(count):
            self.next()
