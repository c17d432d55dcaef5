"""Datasets interleaved by weights that change."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from mixwell.data import readers
from mixwell.data.mixture_dataset import MixtureDataset

WEB = datasets.Dataset.from_dict({"x": list(range(100))})
CODE = datasets.Dataset.from_dict({"x": list(range(1000, 1040))}).to_iterable_dataset(num_shards=4)
BOTH = {"web": WEB, "code": CODE}

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def read(rows: MixtureDataset, count: int) -> list[dict[str, Any]]:
    reading = iter(rows)
    return [next(reading) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.lists(st.integers(1, 50), min_size=3, max_size=3), st.integers(1, 60)),
        min_size=1,
        max_size=4,
    )
)
def test_counts_are_exact_while_weights_change(rounds: list[tuple[list[int], int]]) -> None:
    rows = MixtureDataset({"a": [1], "b": [2], "c": [3]})
    reading = iter(rows)
    for weights, count in rounds:
        rows.weights = weights
        due = {name: weight * count for name, weight in rows.weights.items()}
        seen = Counter(next(reading)[1] for _ in range(count))
        # Within one row of what is due, and one more that may be due from before.
        assert all(abs(seen[name] - due[name]) < 2 + 1e-9 for name in due)


def test_counts_match_interleave_datasets_on_average() -> None:
    weights = {"web": 0.7, "code": 0.3}
    theirs = datasets.interleave_datasets(
        [WEB.to_iterable_dataset(), CODE],
        probabilities=list(weights.values()),
        seed=0,
        stopping_strategy="all_exhausted",
    )
    share = sum(row["x"] < 1000 for row in theirs.take(120)) / 120
    ours = Counter(row["domain"] for row in read(MixtureDataset(BOTH, weights), 120))
    assert ours == {"web": 84, "code": 36}
    assert abs(share - 0.7) < 0.15


@pytest.mark.parametrize("taken", [0, 1, 17, 250])
def test_resume_after_weights_changed(taken: int) -> None:
    rows = MixtureDataset(BOTH, block=8)
    reading = iter(rows)
    for _ in range(taken):
        next(reading)
    rows.weights = {"web": 1, "code": 4}
    for _ in range(taken % 5):
        next(reading)
    state = json.loads(json.dumps(rows.state_dict()))
    rest = [next(reading) for _ in range(100)]
    again = MixtureDataset(BOTH, block=8)
    again.load_state_dict(state)
    assert again.weights == rows.weights
    assert read(again, 100) == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_no_row_is_lost_or_repeated(workers: int) -> None:
    rows = MixtureDataset(BOTH, {"web": 5, "code": 2}, stop="first")
    loader = DataLoader(rows, batch_size=4, num_workers=workers)
    seen = Counter(x for batch in loader for x in batch["x"].tolist())
    assert max(seen.values()) == 1
    assert len([x for x in seen if x < 1000]) >= 98
    assert len([x for x in seen if x >= 1000]) >= 38


def test_workers_see_new_weights() -> None:
    rows = MixtureDataset(BOTH, {"web": 1, "code": 0})
    batches = iter(DataLoader(rows, batch_size=10, num_workers=2, prefetch_factor=1))
    assert set(next(batches)["domain"]) == {"web"}
    rows.weights = {"web": 0, "code": 1}
    assert set([next(batches) for _ in range(8)][-1]["domain"]) == {"code"}


def test_second_iteration_continues() -> None:
    rows = MixtureDataset({"web": WEB})
    assert sorted(row["x"] for row in read(rows, 50) + read(rows, 50)) == list(range(100))
    loader = DataLoader(MixtureDataset({"web": WEB}), batch_size=10, num_workers=2)
    times = [
        [x for _, batch in zip(range(4), loader, strict=False) for x in batch["x"].tolist()] for _ in range(2)
    ]
    assert times[0] != times[1]


def test_workers_ignore_iteration_of_main_process() -> None:
    rows = MixtureDataset({"web": WEB}, stop="all")
    rows.state_dict()
    seen = Counter(x for batch in DataLoader(rows, num_workers=2) for x in batch["x"].tolist())
    assert seen == Counter(range(100))


def test_workers_resume() -> None:
    def loader() -> Any:
        return StatefulDataLoader(MixtureDataset(BOTH, {"web": 3, "code": 1}), batch_size=8, num_workers=2)

    first = loader()
    next(iter(first))  # an epoch that is left
    reading = iter(first)
    for _ in range(5):
        next(reading)
    state = copy.deepcopy(first.state_dict())
    rest = [next(reading)["x"].tolist() for _ in range(6)]
    second = loader()
    second.load_state_dict(state)
    reading = iter(second)
    assert [next(reading)["x"].tolist() for _ in range(6)] == rest


def test_ranks_read_different_rows() -> None:
    parts = [MixtureDataset({"web": WEB}, stop="all", rank=rank, world_size=3) for rank in range(3)]
    seen = Counter(row["x"] for part in parts for row in part)
    assert seen == Counter(range(100))


def test_epochs_have_different_orders() -> None:
    rows = MixtureDataset({"web": WEB}, stop="all")
    first, again = list(rows), list(rows)
    rows.set_epoch(1)
    second = list(rows)
    assert first == again != second
    assert sorted(row["x"] for row in first) == sorted(row["x"] for row in second) == list(range(100))


@pytest.mark.parametrize(("stop", "web", "code"), [("first", 40, 40), ("all", 100, 100)])
def test_iteration_ends_with_last_row(stop: Any, web: int, code: int) -> None:
    seen = Counter(row["domain"] for row in MixtureDataset(BOTH, stop=stop))
    assert abs(seen["web"] - web) <= 1
    assert abs(seen["code"] - code) <= 1
    first = Counter(row["x"] for row in MixtureDataset(BOTH, stop="first") if row["domain"] == "code")
    assert first == Counter(range(1000, 1040))


def test_rows_of_any_type() -> None:
    assert read(MixtureDataset({"a": [(1, 2)]}), 1) == [((1, 2), "a")]
    assert read(MixtureDataset({"a": [{"x": 1}]}, column="source"), 1) == [{"x": 1, "source": "a"}]
    assert MixtureDataset(BOTH, [3, 1]).expected_counts(8) == {"web": 6.0, "code": 2.0}


def test_invalid_input_raises() -> None:
    with pytest.raises(ValueError, match="code: the dataset is empty; leave it out, or give it rows"):
        MixtureDataset({"web": WEB, "code": []})
    with pytest.raises(ValueError, match="there are no datasets"):
        MixtureDataset({})
    with pytest.raises(ValueError, match="web: expected a dataset, got int"):
        MixtureDataset({"web": 3})
    with pytest.raises(ValueError, match="'book' is unknown"):
        MixtureDataset(BOTH, {"web": 1, "code": 1, "book": 1})
    with pytest.raises(ValueError, match="'code' is missing"):
        MixtureDataset(BOTH, {"web": 1})
    with pytest.raises(ValueError, match="none negative"):
        MixtureDataset(BOTH, [1, -1])
    with pytest.raises(ValueError, match="at least one dataset must have weight"):
        MixtureDataset(BOTH, [0, 0])
    with pytest.raises(ValueError, match="stop must be one of never, first, all, got 'last'"):
        MixtureDataset(BOTH, stop="last")
    with pytest.raises(ValueError, match="the state is of web; the datasets here are web, code"):
        MixtureDataset(BOTH).load_state_dict(MixtureDataset({"web": WEB}).state_dict())
    empty = CODE.filter(lambda row: row["x"] < 0)
    with pytest.raises(ValueError, match="code: there are no rows to take"):
        read(MixtureDataset({"code": empty}), 1)
    with pytest.raises(
        ValueError, match=r"code is a stream of 4 file\(s\), which cannot be read by 5 workers"
    ):
        readers.reader(CODE, "code", key="", worker=(0, 5))
