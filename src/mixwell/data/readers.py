"""Rows of a dataset of any kind, one after the other, split among ranks and their workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset
from typing_extensions import override

from mixwell.data.shuffle import ShuffledCursor
from mixwell.data.streams import Reader, Stream

# Rows that are fetched at once, as most datasets are much slower row by row.
_AHEAD = 64

Place = tuple[int, int]
"""A number from 0, and the number of such places."""


@final
class MapReader(Reader):
    """Reads a map-style dataset in a new order in every epoch.

    Args:
        key: selects the orders.
        place: of this reader among several; each reads rows of its own.

    Example:
        >>> reader = MapReader("abcdefg", "letters", place=(1, 3))
        >>> sorted(reader.take(2)), reader.passes
        (['b', 'e'], 1)
    """

    def __init__(self, dataset: Any, name: str, *, key: str = "", place: Place = (0, 1)) -> None:
        self._dataset, self._place, self._name = dataset, place, name
        number, of = place
        size = len(range(number, len(dataset), of))
        if not size:
            raise ValueError(f"{name} has {len(dataset)} rows, which are too few for {of} readers")
        self._cursor = ShuffledCursor(size, f"{key}, {name}")
        self._ahead: list[Any] = []

    @property
    @override
    def taken(self) -> int:
        return self._cursor.taken - len(self._ahead)

    @property
    @override
    def passes(self) -> int:
        return self.taken // self._cursor.size

    @override
    def take(self, count: int) -> list[Any]:
        missing = count - len(self._ahead)
        if missing > 0:
            number, of = self._place
            indices = number + of * self._cursor.take(max(missing, _AHEAD))
            self._ahead += fetch(self._dataset, indices.tolist())
        given, self._ahead = self._ahead[:count], self._ahead[count:]
        return given

    @override
    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "rows": len(self._dataset), "place": list(self._place)}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != len(self._dataset):
            raise ValueError(
                f"{self._name} had {state['rows']:,} rows when the run was saved, and has "
                f"{len(self._dataset):,}; put the data back as they were"
            )
        if list(state["place"]) != list(self._place):
            raise ValueError(
                f"{self._name} was read by reader {state['place'][0] + 1} of {state['place'][1]} when the run was "
                f"saved, and is by {self._place[0] + 1} of {self._place[1]}; take as many processes and workers "
                "as before, and load the state of each into itself"
            )
        self._cursor.taken, self._ahead = int(state["taken"]), []


def is_stream(dataset: Any) -> bool:
    """Return whether rows come in one order only, and cannot be read by their number."""
    return isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )


def check_datasets(datasets: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if there are no datasets, or one is empty or no dataset."""
    if not datasets:
        raise ValueError("there are no datasets: give at least one, as in {'web': dataset}")
    for name, dataset in datasets.items():
        if is_stream(dataset):
            if not isinstance(dataset, Iterable):
                raise ValueError(f"{name}: expected a dataset, got {type(dataset).__name__}")
        elif not len(dataset):
            raise ValueError(f"{name}: the dataset is empty; leave it out, or give it rows")


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return some rows of a map-style dataset, at once where it has ``__getitems__``, as those of Hugging Face."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def split(dataset: Any, process: Place) -> Any:
    """Return the part of a stream that one rank reads; Hugging Face splits its own by files where possible."""
    number, of = process
    if of == 1:
        return dataset
    if hasattr(dataset, "_distributed"):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=number, world_size=of)
    return _Every(dataset, number, of)


def reader(
    dataset: Any, name: str, *, key: str, block: int = 1, process: Place = (0, 1), worker: Place = (0, 1)
) -> Reader:
    """Return a reader of the rows that one worker of one rank reads.

    Args:
        dataset: of any kind. A PyTorch ``IterableDataset`` splits its rows among workers itself.
        block: rows of a stream that are shuffled together.
    """
    if not is_stream(dataset):
        place = process[0] * worker[1] + worker[0], process[1] * worker[1]
        return MapReader(dataset, name, key=key, place=place)
    stream = split(dataset, process)
    if not isinstance(dataset, IterableDataset):
        stream = split(stream, worker)
    shards = getattr(stream, "num_shards", worker[1])
    if shards < worker[1]:
        raise ValueError(
            f"{name} is a stream of {shards} file(s), which cannot be read by {worker[1]} workers; take at most "
            f"{shards}, or dataset.reshard()"
        )
    return Stream(stream, name, block=block, key=key)


@final
class _Every:
    """Every ``of``-th row of a stream."""

    def __init__(self, dataset: Any, number: int, of: int) -> None:
        self._dataset, self._number, self._of = dataset, number, of

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._dataset), self._number, None, self._of)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
