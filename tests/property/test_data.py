"""Any text comes through sources, tokenizers, sketches and rows as it was."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixwell.data.datasets import TokenRows
from mixwell.data.sampler import Rule, Sampler
from mixwell.data.sketches import LineSketch, overlap
from mixwell.data.sources import JsonLines, Parquet, Piece, Source, TextFiles, Texts
from mixwell.data.sources.text import good_cut
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer, TokenizerFile, train_tokenizer
from mixwell.simplex.constraints import Cap, Floor, constrain
from mixwell.simplex.repetition import EpochCap

characters = st.characters(codec="utf-8", exclude_characters="\0")
any_text = st.text(characters | st.sampled_from("\n\r \ufeffaß😀"))
some_text = any_text.filter(lambda text: text.removeprefix("\ufeff") != "")
lists = st.lists(some_text.filter(lambda text: text[0] != "\ufeff"), min_size=1, max_size=4)
modest = settings(max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    corpus = ["the cat sat on the mat\n" * 9, "größer als die 😀 Katze\n" * 9]
    return train_tokenizer([Texts(corpus)], size=280, path=tmp_path_factory.mktemp("bpe") / "bpe.json")


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_round_trip(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode([text])[0]) == text


@given(texts=st.lists(any_text, max_size=4))
def test_trained_tokenizer_round_trip(bpe: TokenizerFile, texts: list[str]) -> None:
    assert [bpe.decode(ids) for ids in bpe.encode(texts)] == texts
    assert [ids.tolist() for ids in bpe.encode(texts)] == [bpe.encode([text])[0].tolist() for text in texts]


@given(some_text)
def test_cuts_are_inside_the_text(text: str) -> None:
    assert 0 < good_cut(text) <= len(text)


@given(words=st.lists(st.text(st.sampled_from("ab1 .,\n\r\t'sß"), max_size=8), min_size=1, max_size=30))
def test_cuts_at_line_ends_keep_tokens(bpe: TokenizerFile, words: list[str]) -> None:
    text = "a\nb".join(words)
    at = good_cut(text) if text else 0
    if "\n" in text[at : at + 1]:
        first, second, whole = (ids.tolist() for ids in bpe.encode([text[:at], text[at:], text]))
        assert first + second == whole


@modest
@given(some_text, st.integers(1, 40), st.sampled_from(["utf-8", "utf-16", "utf-32", "utf-8-sig"]))
def test_pieces_concatenate_to_file(text: str, piece: int, encoding: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "a.txt").write_bytes(text.encode(encoding))
        source = TextFiles("a.txt", base=Path(name), encoding=encoding, piece=piece)
        pieces = list(source.pieces())
        assert "".join(part.text for part in pieces) == text.removeprefix("\ufeff")
        assert [part.ends for part in pieces] == [False] * (len(pieces) - 1) + [True]
        assert sum(part.read for part in pieces) == source.size()


def all_sources(folder: Path, documents: list[str]) -> Iterator[Source]:
    (folder / "texts").mkdir(parents=True)
    for index, text in enumerate(documents):
        (folder / "texts" / f"{index}.txt").write_bytes(text.encode())
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    pq.write_table(pa.table({"text": documents}), folder / "c.parquet")
    yield TextFiles("texts", base=folder, piece=5)
    yield JsonLines("a.jsonl", base=folder)
    yield JsonLines("b.jsonl.gz", base=folder)
    yield Parquet("c.parquet", base=folder)
    yield Texts(documents)


@modest
@given(lists)
def test_all_sources_give_the_same_tokens(documents: list[str]) -> None:
    expected = [number for text in documents for number in (*text.encode(), 256)]
    with tempfile.TemporaryDirectory() as name:
        for source in all_sources(Path(name) / "in", documents):
            made = tokenize(source, ByteTokenizer(), cache=Path(name) / "cache")
            assert made.array().tolist() == expected
            assert made.documents == len(documents)
            assert made.text_bytes == len("".join(documents).encode())


@modest
@given(lists, some_text)
def test_fingerprints_depend_on_content_not_path(documents: list[str], more: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("one", "other/place", "changed")]
        contents = [documents, documents, [*documents, more.lstrip("\ufeff") + "!"]]
        one, other, changed = (
            [source.fingerprint(Path(name) / "cache") for source in all_sources(folder, content)]
            for folder, content in zip(folders, contents, strict=True)
        )
        assert one == other
        assert not set(one) & set(changed)
        assert len(set(one)) == len(one)


class Breaking(Source):
    """Breaks after some pieces, the first time."""

    def __init__(self, documents: list[str], after: int) -> None:
        super().__init__("breaking")
        self.whole, self.after = Texts(documents), after

    def pieces(self) -> Iterator[Piece]:
        for index, piece in enumerate(self.whole.pieces()):
            if index == self.after:
                self.after = -1
                raise OSError("the disk is gone")
            yield piece

    def fingerprint(self, cache: Path | None = None) -> str:
        return self.whole.fingerprint(cache)

    def size(self) -> int | None:
        return self.whole.size()


@modest
@given(lists, st.data())
def test_incomplete_files_of_a_crash_are_not_used(documents: list[str], data) -> None:
    source = Breaking(documents, data.draw(st.integers(0, len(documents) - 1)))
    with tempfile.TemporaryDirectory() as name:
        with pytest.raises(OSError, match="the disk is gone"):
            tokenize(source, ByteTokenizer(), cache=Path(name))
        assert {path.suffix for path in (Path(name) / "tokens").iterdir()} <= {".lock"}
        made = tokenize(source, ByteTokenizer(), cache=Path(name))
        assert ByteTokenizer().decode(made.array()) == "".join(text + "<|endoftext|>" for text in documents)


long_lines = st.lists(
    st.sampled_from([f"{i} is the number of this long line here" for i in range(9)] + ["short"])
)


@given(long_lines, long_lines, st.lists(st.integers(0, 400), max_size=5))
def test_overlap_is_exact_for_any_pieces(one: list[str], other: list[str], cuts: list[int]) -> None:
    text, sketches = "\n".join(one), (LineSketch(), LineSketch())
    edges = [0, *sorted(cuts), len(text) + 400]
    for start, stop in pairwise(edges):
        sketches[0].add(text[start:stop])
    sketches[1].add("\r\n".join(other))
    sought, there = set(one) - {"short"}, set(other) - {"short"}
    expected = len(sought & there) / len(sought) if sought else 0
    assert overlap(*sketches) == expected


@modest
@given(lists, st.integers(1, 9), st.data())
def test_rows_are_slices_of_the_tokens(documents: list[str], length: int, data) -> None:
    with tempfile.TemporaryDirectory() as name:
        made = tokenize(Texts(["x" * length, *documents]), ByteTokenizer(), cache=Path(name))
        rows, flat = TokenRows(made, length=length), made.array().tolist()
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
        batch = rows.batch(np.array(chosen, np.int64))
        assert batch.tolist() == [flat[i * length : i * length + length + 1] for i in chosen]


@modest
@given(
    st.integers(3, 20),
    st.integers(5, 60),
    st.lists(st.integers(20, 2000), min_size=2, max_size=5),
    st.sampled_from(["weight", "equal"]),
    st.floats(0, 0.9),
    st.floats(0.3, 1),
    st.integers(0, 2**32 - 1),
)
def test_exhausted_rows_do_not_stop_run(
    batch: int, steps: int, rows: list[int], rule: Rule, floor: float, cap: float, seed: int
) -> None:
    """Floors and caps give way to what is left, every row is seen at most once, and each batch is full."""
    sizes = {f"d{index}": n for index, n in enumerate(rows)}
    if sum(rows) < batch * steps or cap * len(rows) < 1:
        return
    chance = np.random.default_rng(seed)
    epochs = EpochCap(sizes, 1, batch_size=batch, budget=steps)
    bounds = [epochs, Floor({"d0": floor * cap / len(rows)}), Cap(cap)]
    sampler = Sampler(sizes, batch, rule=rule, cap=epochs)
    weights = constrain(list(sizes), np.zeros(len(rows)), bounds)
    for step in range(steps):
        drawn = sampler.draw(weights)
        assert sum(map(len, drawn.values())) == batch
        if step % 7 == 6 or step == steps - 1:
            log = np.log(chance.dirichlet(np.full(len(rows), 0.3)) + 1e-12)
            weights = constrain(list(sizes), log, bounds)
            assert weights.sum() == pytest.approx(1)
    assert all(sampler.taken[name] <= n for name, n in sizes.items())
