"""Streams and readers give every row once, and go on exactly where they were saved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixwell.data import readers
from mixwell.data.streams import Stream

ROWS = [{"x": number} for number in range(40)]
HUB = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)


class WithoutState:
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


SOURCES: dict[str, Iterable[Any]] = {
    "a list": ROWS,
    "an iterable": WithoutState(),
    "a stream": HUB,
    "a mapped stream": HUB.map(lambda row: {"y": row["x"] + 1}),
}


def numbers(rows: list[Any]) -> list[int]:
    return [row["x"] for row in rows]


@pytest.mark.parametrize("kind", SOURCES)
@settings(max_examples=15, deadline=None)
@given(taken=st.integers(0, 90), more=st.integers(0, 9), block=st.sampled_from([1, 3, 7, 64]))
def test_resume_from_saved_position(kind: str, taken: int, more: int, block: int) -> None:
    first = Stream(SOURCES[kind], kind, block=block)
    first.take(taken)
    first.state()  # looks ahead, which must change nothing
    first.take(more)
    state = json.loads(json.dumps(first.state()))
    rest = first.take(50)
    second = Stream(SOURCES[kind], kind, block=block)
    second.load_state(state)
    assert second.take(50) == rest
    assert (second.taken, second.passes) == (first.taken, first.passes)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_epoch_has_every_row_once(kind: str, block: int) -> None:
    stream = Stream(SOURCES[kind], kind, block=block)
    passes = [numbers(stream.take(40)) for _ in range(3)]
    assert all(sorted(one) == list(range(40)) for one in passes)
    if block > 1:
        assert passes[0] != passes[1]


def test_a_shuffle_buffer_loses_no_rows() -> None:
    """The library's own state leaves out what is in the buffer."""
    shuffled = HUB.shuffle(seed=3, buffer_size=7)
    first = Stream(shuffled, "web")
    begun = numbers(first.take(13))
    state = first.state()
    second = Stream(shuffled, "web")
    with pytest.warns(UserWarning, match="web does not resume where it was saved"):
        second.load_state(state)
    assert sorted(begun + numbers(second.take(27))) == list(range(40))


def test_changed_rows_raise() -> None:
    stream = Stream(ROWS, "web")
    stream.take(12)
    with pytest.raises(ValueError, match="web: the rows from 12 on are not those"):
        Stream([{"x": -1}] * 40, "web").load_state(stream.state())


def test_invalid_sources_raise() -> None:
    with pytest.raises(ValueError, match="web: an iterator can be read once only"):
        Stream(iter(ROWS), "web")
    with pytest.raises(ValueError, match="web: there are no rows to take"):
        Stream([], "web").take(1)
    with pytest.raises(ValueError, match="web: a block must have at least 1 row, got 0"):
        Stream(ROWS, "web", block=0)


@pytest.mark.parametrize("kind", ["a list", "an iterable", "a stream"])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_readers_partition_rows(kind: str, processes: int, workers: int) -> None:
    if kind == "a stream" and workers > 1:
        pytest.skip("PyTorch's own streams split their rows in a worker process only")
    seen: Counter[int] = Counter()
    for process in range(processes):
        for worker in range(workers):
            reader = readers.reader(
                SOURCES[kind], kind, key="any", process=(process, processes), worker=(worker, workers)
            )
            while not reader.passes:
                seen.update(numbers(reader.take(1)))
    assert seen == Counter(range(40))


def test_map_reader_resumes() -> None:
    first = readers.MapReader(ROWS, "web", place=(1, 3))
    first.take(100)
    state = json.loads(json.dumps(first.state()))
    second = readers.MapReader(ROWS, "web", place=(1, 3))
    second.load_state(state)
    assert second.take(70) == first.take(70)
    with pytest.raises(
        ValueError, match="was read by reader 2 of 3 when the run was saved, and is by 2 of 2"
    ):
        readers.MapReader(ROWS, "web", place=(1, 2)).load_state(state)
    with pytest.raises(ValueError, match="web had 40 rows when the run was saved, and has 39"):
        readers.MapReader(ROWS[1:], "web", place=(1, 3)).load_state(state)
    with pytest.raises(ValueError, match="web has 40 rows, which are too few for 41 readers"):
        readers.MapReader(ROWS, "web", place=(40, 41))
