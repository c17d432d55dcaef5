"""Rows and columns of nested batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mixwell import MixtureLoader
from mixwell.utils.nested import concat_batches, slice_rows

X, Y = torch.arange(12).view(4, 3), torch.arange(4)
ROWS = [{"x": row, "y": target} for row, target in zip(X, Y, strict=True)]


class Pair(NamedTuple):
    x: Any
    y: Any


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(*map(plain, batch)) if isinstance(batch, Pair) else type(batch)(map(plain, batch))
    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, X[1:3]),
        ((X, Y), (X[1:3], Y[1:3])),
        ([X, Y], [X[1:3], Y[1:3]]),
        (Pair(X, Y), Pair(X[1:3], Y[1:3])),
        ({"x": X, "pair": (X, Y)}, {"x": X[1:3], "pair": (X[1:3], Y[1:3])}),
        ({"x": X, "text": list("abcd")}, {"x": X[1:3], "text": ["b", "c"]}),
        # A list within a mapping is one column, also where its items have as many entries as there are rows.
        ({"x": X, "tokens": [[1, 2, 3, 4]] * 4}, {"x": X[1:3], "tokens": [[1, 2, 3, 4]] * 2}),
        (list(X), list(X[1:3])),
        (list(Y), list(Y[1:3])),
        (tuple(Y), tuple(Y[1:3])),
        (ROWS, ROWS[1:3]),
        (list(zip(X, Y, strict=True)), list(zip(X[1:3], Y[1:3], strict=True))),
        (list("abcd"), ["b", "c"]),
        (["four"] * 4, ["four"] * 2),
        ([X.numpy(), list("abcd")], [X.numpy()[1:3], ["b", "c"]]),
        ((Y, Y, Y, Y), (Y[1:3],) * 4),
    ],
    ids=str,
)
def test_the_number_of_rows_tells_rows_from_columns(batch: Any, expected: Any) -> None:
    assert plain(slice_rows(batch, 1, 3, 4)) == plain(expected)
    parts = [slice_rows(batch, 0, 1, 4), slice_rows(batch, 1, 4, 4)]
    whole = concat_batches(parts, [1, 3])
    assert plain(whole) == plain(list(batch) if isinstance(whole, list) else batch)


def test_a_list_of_as_many_tensors_as_each_has_rows_is_refused() -> None:
    square = list(torch.arange(16).view(4, 4))
    with pytest.raises(ValueError, match="a list of 4 entries with 4 rows each may hold rows or columns"):
        slice_rows(square, 0, 2, 4)
    # Other parts of the same form decide.
    whole = concat_batches([square, list(torch.arange(8).view(2, 4))], [4, 2])
    assert [len(row) for row in whole] == [4] * 6


@pytest.mark.parametrize(
    "batch", [torch.ones(1, 4), torch.tensor(1.0), {"x": X, "n": 4}, [X, Y[:2]], (), "four"]
)
def test_what_has_other_rows_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="a batch of 4 rows holds a .* does not have 4 rows"):
        slice_rows(batch, 0, 2, 4)


@pytest.mark.parametrize("of", ["tensors", "mappings", "pairs"])
def test_a_loader_that_lists_rows_divides_the_list(of: str) -> None:
    """Rows with three numbers: neither a row nor a number is taken for a column."""
    make = {"tensors": lambda x: x, "mappings": lambda x: {"x": x}, "pairs": lambda x: (x, x.sum())}[of]
    read = {"tensors": lambda row: row, "mappings": lambda row: row["x"], "pairs": lambda row: row[0]}[of]
    domains = {name: [make(torch.full((3,), k)) for _ in range(9)] for k, name in enumerate("abc")}
    [batch] = MixtureLoader(domains, 9, collate=list).next_step(np.array([4, 3, 2]) / 9)
    for part in batch.by_domain():
        assert [read(row).tolist() for row in part.rows] == [["abc".index(part.domain)] * 3] * len(part.rows)
        assert len(part.rows) == part.count
    pieces = batch.split(4)
    assert [len(piece.rows) for piece in pieces] == [4, 4, 1]
    assert [read(row)[0].item() for piece in pieces for row in piece.rows] == batch.labels.tolist()


def test_two_rows_of_two_columns_are_columns_by_default() -> None:
    """``default_collate`` returns a list for rows that are tuples, which could be taken for two rows."""
    domains = {name: [(torch.full((2,), k), k) for _ in range(8)] for k, name in enumerate("ab")}
    [batch] = MixtureLoader(domains, 4).next_step(np.array([0.5, 0.5]))
    x, y = batch.rows
    assert x.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert y.tolist() == batch.labels.tolist() == [0, 0, 1, 1]
    assert [[len(column) for column in part.rows] for part in batch.by_domain(max_rows=1)] == [[1, 1]] * 4
