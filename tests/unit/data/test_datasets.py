"""Rows of tokens, tensors and datasets by number."""

from __future__ import annotations

import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from mixwell.data.datasets import DatasetRows, TensorRows, TokenRows
from mixwell.data.sources import Texts
from mixwell.data.tokenization import TokenFile, open_tokens, tokenize
from mixwell.data.tokenizer import ByteTokenizer


def tokens(folder: Path, count: int, kind: str = "uint16") -> TokenFile:
    np.save(folder / "tokens.npy", np.arange(count, dtype=kind))
    return open_tokens(folder / "tokens.npy", vocabulary=100_000)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int64"])
def test_rows_of_tokens(tmp_path: Path, kind: str) -> None:
    rows = TokenRows(tokens(tmp_path, 22, kind), length=7)
    assert len(rows) == 3
    batch = rows.batch(np.array([2, 0, 2]))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [list(range(14, 22)), list(range(8)), list(range(14, 22))]
    assert rows.batch(np.array([], np.int64)).shape == (0, 8)
    assert len(TokenRows(tokens(tmp_path, 21), length=7)) == 2


def test_too_few_tokens_raise(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="poems has 120 tokens, fewer than one row of 257; lower model.context or"
    ):
        TokenRows(tokens(tmp_path, 120), length=256, name="poems")
    assert len(TokenRows(tokens(tmp_path, 257), length=256)) == 1
    with pytest.raises(ValueError, match="at least 1 token, got a length of 0"):
        TokenRows(tokens(tmp_path, 120), length=0)


@pytest.mark.parametrize("index", [-1, 3])
def test_invalid_row_index_raises(tmp_path: Path, index: int) -> None:
    several = [TokenRows(tokens(tmp_path, 22), length=7), TensorRows(torch.ones(3)), DatasetRows([1, 2, 3])]
    for rows in several:
        with pytest.raises(IndexError, match=rf"rows {index} to {index} were asked for, there are 3"):
            rows.batch(np.array([index]))


def test_token_rows_pickle_without_content(tmp_path: Path) -> None:
    rows = TokenRows(tokens(tmp_path, 60_000), length=7)
    first = rows.batch(np.array([5]))
    sent = pickle.dumps(rows)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent).batch(np.array([5])), first)


def test_token_digests(tmp_path: Path) -> None:
    one, other = (
        tokenize(Texts([text]), ByteTokenizer(), cache=tmp_path) for text in ("one text", "other text")
    )
    rows = [TokenRows(one, length=2), TokenRows(one, length=3), TokenRows(other, length=2)]
    assert len({each.digest() for each in rows}) == 3
    assert TokenRows(one, length=2).digest() == rows[0].digest()


def test_rows_of_tensors() -> None:
    images, labels = torch.randn(10, 2, 3), torch.arange(10)
    assert torch.equal(TensorRows(images).batch(np.array([3, 1])), images[[3, 1]])
    pair = TensorRows(images, labels)
    assert len(pair) == 10
    some_images, some_labels = pair.batch(np.array([9, 9]))
    assert torch.equal(some_images, images[[9, 9]])
    assert some_labels.tolist() == [9, 9]
    with pytest.raises(ValueError, match=r"the same number of rows, got \[10, 9\]"):
        TensorRows(images, labels[:9])
    for none in ((), (torch.tensor(1),), (torch.empty(0, 3),)):
        with pytest.raises(ValueError, match="expected tensors with rows, got"):
            TensorRows(*none)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensor_digests(kind: torch.dtype) -> None:
    zeros = torch.zeros(1000, 2).to(kind)
    changed = zeros.clone()
    changed[-1] = 1
    digests = [TensorRows(one).digest() for one in (zeros, changed, zeros[:999], zeros.view(1000, 2, 1))]
    assert len(set(digests)) == 4
    assert TensorRows(zeros.clone().requires_grad_(kind.is_floating_point)).digest() == digests[0]


class Squares(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": index, "y": index**2}


def test_rows_of_datasets() -> None:
    rows = DatasetRows(Squares())
    batch = rows.batch(np.array([3, 0]))
    assert {name: values.tolist() for name, values in batch.items()} == {"x": [3, 0], "y": [9, 0]}
    assert DatasetRows(Squares(), collate=len).batch(np.array([3, 0])) == 2
    pairs = DatasetRows(Subset(TensorDataset(torch.arange(6), torch.arange(6) * 2), [5, 4]))
    assert [part.tolist() for part in pairs.batch(np.array([0, 1]))] == [[5, 4], [10, 8]]
    table = DatasetRows(datasets.Dataset.from_dict({"x": [1, 2, 3]}))
    assert table.batch(np.array([2, 0]))["x"].tolist() == [3, 1]
    assert rows.digest() == DatasetRows(Squares()).digest() != pairs.digest()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Unsized(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


def test_unsupported_datasets_raise() -> None:
    with pytest.raises(ValueError, match="Stream gives its rows in one order only.* use a map-style dataset"):
        DatasetRows(Stream())
    with pytest.raises(ValueError, match="Unsized does not say how many rows it has; give it __len__"):
        DatasetRows(Unsized())
    with pytest.raises(ValueError, match="list has no rows"):
        DatasetRows([])
