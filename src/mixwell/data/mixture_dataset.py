"""Datasets interleaved by weights that may change while they are read.

In place of ``datasets.interleave_datasets(..., probabilities=...)``, where probabilities are fixed
(huggingface/datasets#7387)::

    rows = MixtureDataset({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
    loader = DataLoader(rows, batch_size=32)
    ...
    rows.weights = mixer.weights.last
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast, final, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mixwell.data.apportionment import Apportionment
from mixwell.data.readers import check_datasets, reader
from mixwell.data.streams import Reader
from mixwell.typing import Vector
from mixwell.utils.user_warnings import warn_user

_WORKERS = 1024

Stop = Literal["never", "first", "all"]


@final
class MixtureDataset(IterableDataset[Any]):
    """Rows of several datasets, one after the other, as often as their weights say.

    The share of every dataset is exact: ``n w_j`` of the first n rows are its rows, within one row
    (:class:`mixwell.data.apportionment.Apportionment`). Map-style datasets are shuffled whole, streams by
    blocks; those that end begin again in another order. The weights may be set at any time, also while workers
    of a ``DataLoader`` read: rows that were fetched ahead are still those of the earlier weights.

    Args:
        datasets: by name; map-style (with ``len`` and ``[i]``) or iterable; of Hugging Face, PyTorch, or lists.
        weights: positive or zero, by name or in order; they are divided by their sum. ``None`` is uniform.
        column: the name of the column with a row's dataset. Rows that are not mappings become ``(row, name)``.
        stop: ``"never"``, so that a second iteration continues where the first was left; or when the ``"first"``
            dataset with weight has ended, or ``"all"`` have.
        block: rows of a stream that are shuffled together; 1 leaves a stream in order.
        rank: the rank of this process; each rank reads rows of its own.
        world_size: the number of ranks.

    Example:
        >>> rows = MixtureDataset({"a": [{"x": 1}], "b": [{"x": 2}]}, weights={"a": 3, "b": 1})
        >>> read = iter(rows)
        >>> [next(read)["domain"] for _ in range(8)]
        ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        column: str = "domain",
        stop: Stop = "never",
        block: int = 1024,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if stop not in get_args(Stop):
            raise ValueError(f"stop must be one of {', '.join(get_args(Stop))}, got {stop!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be below the world size, got {rank} of {world_size}")
        check_datasets(datasets)
        self._datasets = dict(datasets)
        self.names = tuple(datasets)
        """The names of the datasets."""
        self.column = column
        self._stop: Stop = stop
        self._block, self._seed, self._rank, self._world_size = block, seed, rank, world_size
        # In shared memory, so that workers see what is written to it.
        self._weights = torch.zeros(len(self.names), dtype=torch.float64).share_memory_()
        self.weights = dict.fromkeys(self.names, 1.0) if weights is None else weights
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._begun_by = torch.zeros(_WORKERS, dtype=torch.int64).share_memory_()
        self._reading: _Reading | None = None
        self._begun = False

    @property
    def weights(self) -> dict[str, float]:
        """The weights by name, summing to one."""
        return dict(zip(self.names, self._weights.tolist(), strict=True))

    @weights.setter
    def weights(self, weights: Mapping[str, float] | Sequence[float]) -> None:
        if isinstance(weights, Mapping):
            wrong = set(weights) ^ set(self.names)
            if wrong:
                raise ValueError(
                    f"weights must be given for {', '.join(self.names)}; {sorted(wrong)[0]!r} is "
                    + ("missing" if sorted(wrong)[0] in self.names else "unknown")
                )
            weights = [weights[name] for name in self.names]
        values = np.asarray(weights, dtype=np.float64)
        if values.shape != (len(self.names),) or not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"weights must be {len(self.names)} numbers, none negative; got {list(weights)}")
        if not values.sum():
            raise ValueError("at least one dataset must have weight")
        self._weights.copy_(torch.from_numpy(values / values.sum()))

    @property
    def taken(self) -> dict[str, int]:
        """The number of rows that were read so far in this process, by name."""
        readers = {} if self._reading is None else self._reading.readers
        return {name: readers[name].taken if readers else 0 for name in self.names}

    def expected_counts(self, rows: int) -> dict[str, float]:
        """Return the expected number of rows of each dataset with weight among ``rows``, for ``mixer.batch``."""
        return {name: weight * rows for name, weight in self.weights.items() if weight}

    def set_epoch(self, epoch: int) -> None:
        """Select the orders; the next iteration begins anew with them."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        reading = self._reading = self._continued()
        self._begun = True
        while not self._ended(reading):
            name, row = reading.next(self._weights.numpy())
            yield (
                {**cast("Mapping[str, Any]", row), self.column: name}
                if isinstance(row, Mapping)
                else (row, name)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain values, of the iteration in this process.

        With workers take the ``StatefulDataLoader`` of ``torchdata``, which asks each of them.
        """
        if self._reading is None:
            self._reading = self._begin()
        reading = self._reading
        return {
            "weights": self.weights,
            "epoch": int(self._epoch),
            "time": reading.time,
            "carry": list(reading.turns.carry),
            "readers": {name: one.state() for name, one in reading.readers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another one stopped: the next iteration begins there."""
        if list(state["weights"]) != list(self.names):
            raise ValueError(
                f"the state is of {', '.join(state['weights'])}; the datasets here are {', '.join(self.names)}"
            )
        self.weights = state["weights"]
        self.set_epoch(int(state["epoch"]))
        reading = self._begin(time=int(state["time"]))
        reading.loaded, reading.turns.carry = True, [float(rest) for rest in state["carry"]]
        for name, one in reading.readers.items():
            one.load_state(state["readers"][name])
        self._reading, self._begun = reading, False

    def _continued(self) -> _Reading:
        """Return the iteration that was loaded, or that has no end, otherwise a new one."""
        reading = self._reading
        if reading is None:
            return self._begin()
        if reading.process != os.getpid():
            if reading.loaded:
                warn_user(
                    "the place in the data was loaded in another process than the workers that read them, which "
                    "begin anew; load it by the StatefulDataLoader of torchdata, or read without workers"
                )
            return self._begin()
        resumes = not self._begun or (self._stop == "never" and reading.key == self._key())
        return reading if resumes else self._begin()

    def _ended(self, reading: _Reading) -> bool:
        """Return whether enough of the datasets with weight have ended."""
        if self._stop == "never":
            return False
        weighted = zip(reading.readers.values(), self._weights.tolist(), strict=True)
        passes = [reader.passes for reader, weight in weighted if weight]
        return (max if self._stop == "first" else min)(passes) > 0

    def _begin(self, *, time: int | None = None) -> _Reading:
        """Return a new iteration, the ``time``-th of a worker with this number; ``None`` to count it."""
        worker = get_worker_info()
        place = (0, 1) if worker is None else (worker.id, worker.num_workers)
        key, process = self._key(), (self._rank, self._world_size)
        if time is None:
            time = 0
            if worker is not None and self._stop == "never":
                # Workers are new in every epoch of a loader, and should then not read the same again.
                time = int(self._begun_by[worker.id % _WORKERS])
                self._begun_by[worker.id % _WORKERS] += 1
        order = f"{key}, time {time}" if time else key
        readers = {
            name: reader(dataset, name, key=order, block=self._block, process=process, worker=place)
            for name, dataset in self._datasets.items()
        }
        return _Reading(key, time, readers)

    def _key(self) -> str:
        return f"seed {self._seed}, epoch {int(self._epoch)}"


@final
class _Reading:
    """One iteration: the place in every dataset, and the next one in turn."""

    def __init__(self, key: str, time: int, readers: dict[str, Reader]) -> None:
        self.key, self.time, self.readers = key, time, readers
        self.process, self.loaded = os.getpid(), False
        self.turns = Apportionment(1, len(readers))
        self._each = list(readers.items())

    def next(self, weights: Vector) -> tuple[str, Any]:
        """Return the name of a dataset, and its next row."""
        name, one = self._each[self.turns.next(weights).index(1)]
        return name, one.take(1)[0]
