"""Users' files become documents, and what is wrong with them is said plainly."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mixwell.data.sources import HuggingFace, JsonLines, Parquet, Piece, Source, TextFiles, Texts, paths
from mixwell.data.sources.text import good_cut
from mixwell.utils import checksums, files

DOCUMENTS = ["The first one.\nIt has two lines.", "zweites, mit Größe und 😀", "a third"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(documents: list[str], field: str = "text") -> str:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents))


def documents(source: Source) -> list[str]:
    found, open_text = [], ""
    for piece in source.pieces():
        open_text += piece.text
        if piece.ends:
            found.append(open_text)
            open_text = ""
    assert open_text == ""
    return found


# which files


def test_files_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.md", ".hidden", "sub/.git/e.txt", "odd[1].txt"):
        write(tmp_path / "in" / name, name)

    def names(*patterns: str, suffixes=None) -> list[str]:
        found = paths.expand(patterns, base=tmp_path, suffixes=suffixes)
        return [str(path.relative_to(tmp_path / "in")) for path in found]

    everything = ["a.txt", "b.txt", "odd[1].txt", "sub/c.txt", "sub/deep/d.md"]
    assert names("in") == everything
    assert names(str(tmp_path / "in")) == everything
    assert names("in", suffixes=[".md"]) == ["sub/deep/d.md"]
    assert names("in/*.txt") == ["a.txt", "b.txt", "odd[1].txt"]
    assert names("in/**/*.txt") == ["a.txt", "b.txt", "odd[1].txt", "sub/c.txt"]
    assert names("in/odd[1].txt") == ["odd[1].txt"]
    assert names("in/b.txt", "in/a.txt", "in/sub/../a.txt", "in/*.txt") == ["a.txt", "b.txt", "odd[1].txt"]
    (tmp_path / "in" / "link.txt").symlink_to("a.txt")
    assert names("in/a.txt", "in/link.txt") == ["a.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/in/a.txt", "~/in/sub/*.txt") == ["a.txt", "sub/c.txt"]


@pytest.mark.parametrize(
    ("pattern", "suffixes", "message"),
    [
        ("missing.txt", None, r"there is no file or folder 'missing.txt' in .*base; check the spelling"),
        ("*.md", None, r"no file matches '\*.md' in .*base; check the pattern"),
        (
            "full",
            [".md", ".rst"],
            r"full has no file that ends in .md or .rst \(it has 1 others\); add files",
        ),
        ("bare", None, r"the folder .*bare has no file; add files, or name another folder"),
    ],
)
def test_no_matching_files_raise(tmp_path: Path, pattern: str, suffixes, message: str) -> None:
    write(tmp_path / "base" / "full" / "a.txt", "a")
    (tmp_path / "base" / "bare").mkdir()
    with pytest.raises(ValueError, match=message):
        TextFiles(pattern, base=tmp_path / "base", suffixes=suffixes)


def test_missing_pattern_and_special_file_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file was given; name a file"):
        TextFiles([], base=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file nor a folder"):
        TextFiles("pipe", base=tmp_path)


# fingerprints


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of files that were changed just now are remembered too."""
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1e9)


@pytest.mark.usefixtures("settled")
def test_digests_are_cached(tmp_path: Path) -> None:
    file, cache = write(tmp_path / "a.txt", "one"), tmp_path / "cache"
    first = paths.digests([file], cache)
    (memory,) = (cache / "digests").iterdir()
    changed = memory.read_text().replace(first[0], "remembered")
    memory.write_text(changed)
    assert paths.digests([file], cache) == first, "a changed file of digests is not trusted"
    known = json.loads(changed)["files"]
    memory.write_text(checksums.sealed({"files": known}))
    assert paths.digests([file], cache) == ["remembered"]
    assert paths.digests([file], tmp_path / "other") == first
    os.utime(file, ns=(1, 5 * 10**17))
    assert paths.digests([file], cache) == first
    memory.write_text("[damaged")
    assert paths.digests([file], cache) == first
    # as earlier versions wrote it
    now = file.stat()
    memory.write_text(json.dumps({"a.txt": [now.st_size, now.st_mtime_ns, "remembered"]}))
    assert paths.digests([file], cache) == first


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("in_place", [True, False])
def test_rewritten_file_with_same_size_and_time_is_read(tmp_path: Path, in_place: bool) -> None:
    file, cache = write(tmp_path / "a.txt", "one"), tmp_path / "cache"
    os.utime(file, ns=(1, 10**18))
    first, times = paths.digests([file], cache), file.stat()
    # the clock of the file system may be coarse
    while file.stat().st_ctime_ns == times.st_ctime_ns:
        other = write(file if in_place else tmp_path / "b.txt", "two")
        os.utime(other, ns=(1, 10**18))
        other.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    assert paths.digests([file], cache) != first


def test_recently_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one")
    first, times = paths.digests([file], tmp_path / "cache"), file.stat()
    write(file, "two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert paths.digests([file], tmp_path / "cache") != first


def test_missing_file_raises(tmp_path: Path) -> None:
    source = TextFiles(write(tmp_path / "a.txt", "one"), base=tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match="cannot read .*a.txt: No such file"):
        source.fingerprint()
    with pytest.raises(ValueError, match="cannot read .*a.txt: No such file"):
        list(source.pieces())


def test_fingerprints_depend_on_settings(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "a.jsonl", '{"text": "one", "title": "two"}\n')
    sources = [
        TextFiles("a.txt", base=tmp_path),
        TextFiles("a.txt", base=tmp_path, encoding="latin-1"),
        TextFiles("a.txt", base=tmp_path, errors="replace"),
        JsonLines("a.jsonl", base=tmp_path),
        JsonLines("a.jsonl", base=tmp_path, field="title"),
        Texts(["ab", "c"]),
        Texts(["a", "bc"]),
    ]
    assert len({source.fingerprint() for source in sources}) == len(sources)
    same = TextFiles("a.txt", base=tmp_path, encoding="UTF8")
    assert same.fingerprint() == sources[0].fingerprint()


# text


def test_text_files_are_documents(tmp_path: Path) -> None:
    for name, text in zip("abc", DOCUMENTS, strict=True):
        write(tmp_path / f"{name}.txt", text)
    source = TextFiles("*.txt", base=tmp_path)
    assert documents(source) == DOCUMENTS
    assert source.name == "*.txt"
    assert (
        source.size()
        == sum(piece.read for piece in source.pieces())
        == sum(len(t.encode()) for t in DOCUMENTS)
    )


def test_long_files_are_split_at_line_ends(tmp_path: Path) -> None:
    text = "".join(f"line {i} of many\n" for i in range(1000))
    write(tmp_path / "a.txt", text)
    pieces = list(TextFiles("a.txt", base=tmp_path, piece=1000).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 10
    assert all(piece.text.startswith("\n") for piece in pieces[1:])
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_cuts() -> None:
    assert good_cut("word, \n\nword\nrest") == 12
    assert good_cut("only dots.\n.\n..") == 13
    assert good_cut("\n" * 5000) == 5000
    assert good_cut(" x") == 2


def test_encodings_and_byte_order_marks(tmp_path: Path) -> None:
    text = "naïve\r\ncafé"
    write(tmp_path / "mark.txt", b"\xef\xbb\xbf" + text.encode())
    write(tmp_path / "latin.txt", text.encode("latin-1"))
    write(tmp_path / "wide.txt", text.encode("utf-16"))
    assert documents(TextFiles("mark.txt", base=tmp_path)) == [text]
    assert documents(TextFiles("mark.txt", base=tmp_path, piece=1)) == [text]
    assert documents(TextFiles("latin.txt", base=tmp_path, encoding="latin-1")) == [text]
    assert documents(TextFiles("wide.txt", base=tmp_path, encoding="utf-16", piece=3)) == [text]
    assert documents(TextFiles("latin.txt", base=tmp_path, errors="replace")) == ["na\ufffdve\r\ncaf\ufffd"]
    with pytest.raises(ValueError, match="there is no text encoding 'utf-9'; try utf-8"):
        TextFiles("mark.txt", base=tmp_path, encoding="utf-9")
    with pytest.raises(ValueError, match="there is no text encoding 'hex'"):
        TextFiles("mark.txt", base=tmp_path, encoding="hex")
    with pytest.raises(ValueError, match="errors must be one of strict, replace, ignore, got 'skip'"):
        TextFiles("mark.txt", base=tmp_path, errors="skip")


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_invalid_utf8_raises(tmp_path: Path, piece: int) -> None:
    write(tmp_path / "bad.txt", "größe\nzwei\n".encode() + b"caf\xe9 noir\n")
    source = TextFiles("bad.txt", base=tmp_path, piece=piece)
    place = len("größe\nzwei\ncaf".encode())
    with pytest.raises(
        ValueError, match=rf"bad.txt: byte {place} \(line 3\) is not utf-8: .*\(e9\)"
    ) as caught:
        list(source.pieces())
    for advice in ("encoding: latin-1", "errors: replace", "leave the file out"):
        assert advice in str(caught.value)


def test_truncated_character_raises(tmp_path: Path) -> None:
    write(tmp_path / "bad.txt", b"ab\xc3")
    with pytest.raises(ValueError, match=r"byte 2 \(line 1\) is not utf-8: unexpected end of data"):
        list(TextFiles("bad.txt", base=tmp_path).pieces())


def test_binary_files_raise(tmp_path: Path) -> None:
    write(tmp_path / "image.png", b"\x89PNG\r\n\x1a\n\x00\x00")
    write(tmp_path / "wide.txt", "text".encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"image.png looks binary \(there is a NUL at byte 8\)"):
        list(TextFiles("image.png", base=tmp_path).pieces())
    with pytest.raises(ValueError, match=r"looks binary \(there is a NUL at line 2\)"):
        write(tmp_path / "nul.txt", "one\ntwo\0".encode("utf-16"))
        list(TextFiles("nul.txt", base=tmp_path, encoding="utf-16").pieces())
    with pytest.raises(ValueError, match=r"if it is UTF-16 text, say so \(encoding: utf-16\)"):
        list(TextFiles("wide.txt", base=tmp_path).pieces())


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_empty_files_are_skipped_with_warning(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "a.txt", content)
    write(tmp_path / "b.txt", "text")
    with pytest.warns(UserWarning, match="a.txt is empty; it is left out") as caught:
        assert documents(TextFiles("*.txt", base=tmp_path)) == ["text"]
    assert len(caught) == 1


# JSON lines


def test_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", "\ufeff\n" + lines(DOCUMENTS[:1]) + "  \n\n")
    write(tmp_path / "in" / "b.jsonl.gz", gzip.compress(lines(DOCUMENTS[1:]).encode()))
    write(tmp_path / "in" / "README.md", "about these data")
    source = JsonLines("in", base=tmp_path)
    assert documents(source) == DOCUMENTS
    write(tmp_path / "c.gz", gzip.compress(lines(DOCUMENTS, "body").encode()))
    assert documents(JsonLines("c.gz", base=tmp_path, field="body")) == DOCUMENTS
    read = [piece.read for piece in JsonLines("c.gz", base=tmp_path, field="body").pieces()]
    assert 0 < sum(read) <= (tmp_path / "c.gz").stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "cut off',
            r"a.jsonl:3: not JSON \(Unterminated string starting at: column 10\); every line must be one",
        ),
        ('{"title": "x", "body": "y"}', r"a.jsonl:3: there is no field 'text'; the fields are body, title"),
        ("{}", r"a.jsonl:3: there is no field 'text'; the fields are none"),
        ('{"text": 7}', r"a.jsonl:3: the field 'text' is not text, got int 7; name a field with text"),
        ('{"text": ["x"]}', r"a.jsonl:3: the field 'text' is not text, got list \[\"x\"\]"),
        ("[1, 2]", r"a.jsonl:3: expected a JSON object with a field 'text', got \[1, 2\]"),
        ('{"text": "a \\ud800"}', r"a.jsonl:3: the field 'text' has half a character \('\\ud800' at 2\)"),
        (b'{"text": "caf\xe9"}', r"a.jsonl:3: byte 13 of the line is not utf-8: .*encoding: latin-1"),
        ("[" * 100_000, r"a.jsonl:3: not JSON that can be read"),
        (
            '{"text": "x", "id": ' + "7" * 5000 + "}",
            r"a.jsonl:3: a number is too long to be read \(more than 4300 digits\); write it as text",
        ),
    ],
)
def test_invalid_json_lines_raise(tmp_path: Path, line: str | bytes, message: str) -> None:
    bad = line.encode() if isinstance(line, str) else line
    write(tmp_path / "a.jsonl", lines(DOCUMENTS[:1]).encode() + b"\n" + bad + b"\n")
    with pytest.raises(ValueError, match=message):
        list(JsonLines("a.jsonl", base=tmp_path).pieces())


def test_json_lines_with_null_field_warn(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": null}\n{"text": "x"}\n{"text": null}\n')
    with pytest.warns(UserWarning, match="a.jsonl: 2 documents with nothing in 'text' were left out"):
        assert documents(JsonLines("a.jsonl", base=tmp_path)) == ["x"]


def test_unreadable_json_lines_raise(tmp_path: Path) -> None:
    packed = gzip.compress(lines(DOCUMENTS * 50).encode())
    write(tmp_path / "cut.jsonl.gz", packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="cut.jsonl.gz is damaged .* fetch it again"):
        list(JsonLines("cut.jsonl.gz", base=tmp_path).pieces())
    with pytest.raises(ValueError, match="JSON lines cannot be read as utf-16; convert"):
        JsonLines("cut.jsonl.gz", base=tmp_path, encoding="utf-16")


# Parquet


def test_parquet(tmp_path: Path) -> None:
    for name, kind in (
        ("a", pa.string()),
        ("b", pa.large_string()),
        ("c", pa.dictionary(pa.int8(), pa.string())),
    ):
        table = pa.table({"id": [1, 2, 3], "text": pa.array(DOCUMENTS).cast(kind)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    write(tmp_path / "_SUCCESS", "")
    source = Parquet(".", base=tmp_path, field="text")
    assert documents(source) == DOCUMENTS * 3
    assert sum(piece.read for piece in source.pieces()) == source.size()


def test_parquet_is_read_in_parts(tmp_path: Path) -> None:
    rows = pa.table({"text": [f"{i:08d}" * 1000 for i in range(5000)]})
    pq.write_table(rows, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    del rows
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in Parquet("a.parquet", base=tmp_path).pieces()]
    assert len(held) == 5000
    assert max(held) < (tmp_path / "a.parquet").stat().st_size / 2


def test_invalid_parquet_raises(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "body": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: there is no column 'text'; the columns are id, body"):
        list(Parquet("a.parquet", base=tmp_path).pieces())
    with pytest.raises(ValueError, match="the column 'id' is not text, got int64; name a column with text"):
        list(Parquet("a.parquet", base=tmp_path, field="id").pieces())
    with pytest.warns(UserWarning, match="a.parquet: 1 documents with nothing in 'body' were left out"):
        assert documents(Parquet("a.parquet", base=tmp_path, field="body")) == ["x"]
    write(tmp_path / "b.parquet", "this is no table")
    with pytest.raises(
        ValueError, match="b.parquet is not a readable Parquet file .*; fetch or write it again"
    ):
        list(Parquet("b.parquet", base=tmp_path).pieces())


# datasets


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = datasets.Dataset.from_dict({"text": DOCUMENTS, "id": [1, 2, 3]})
    table.save_to_disk(str(tmp_path / "saved"))
    return tmp_path


def test_dataset_saved_to_disk(saved: Path) -> None:
    source = HuggingFace("saved", base=saved)
    assert not source.remote
    assert source.size() is None
    assert documents(source) == DOCUMENTS
    assert documents(HuggingFace("saved", base=saved, limit=2)) == DOCUMENTS[:2]
    limited = HuggingFace("saved", base=saved, limit=2)
    before = source.fingerprint()
    assert limited.fingerprint() != before
    (saved / "saved").rename(saved / "moved")
    assert HuggingFace("moved", base=saved).fingerprint() == before
    changed = datasets.Dataset.from_dict({"text": DOCUMENTS[:2]})
    changed.save_to_disk(str(saved / "changed"))
    assert HuggingFace("changed", base=saved).fingerprint() != before


def test_dataset_splits(tmp_path: Path) -> None:
    parts = {"train": DOCUMENTS, "test": ["a test"]}
    whole = datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in parts.items()})
    whole.save_to_disk(str(tmp_path / "saved"))
    assert documents(HuggingFace("saved", base=tmp_path)) == DOCUMENTS
    assert documents(HuggingFace("saved", base=tmp_path, split="test")) == ["a test"]
    with pytest.raises(ValueError, match="there is no split 'dev'; the splits are train, test"):
        list(HuggingFace("saved", base=tmp_path, split="dev").pieces())


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "copies")
    write(tmp_path / "in" / "a.jsonl", lines(DOCUMENTS))
    source = HuggingFace("json", base=tmp_path, data_files="in/*.jsonl", streaming=streaming)
    folder = HuggingFace("in", base=tmp_path, streaming=streaming)
    for local in (source, folder):
        assert not local.remote
        assert documents(local) == DOCUMENTS
    before = source.fingerprint(), folder.fingerprint()
    write(tmp_path / "in" / "a.jsonl", lines(DOCUMENTS[:2]))
    assert not {source.fingerprint(), folder.fingerprint()} & set(before)


def test_invalid_datasets_raise(saved: Path) -> None:
    with pytest.raises(ValueError, match="saved: there is no column 'body'; the columns are text, id"):
        list(HuggingFace("saved", base=saved, field="body").pieces())
    with pytest.raises(ValueError, match="saved, split train: the field 'id' is not text, got int 1"):
        list(HuggingFace("saved", base=saved, field="id").pieces())
    with pytest.raises(ValueError, match="limit must be at least 1 document, got 0"):
        HuggingFace("saved", base=saved, limit=0)
    with pytest.raises(ValueError, match="no file matches"):
        HuggingFace("json", base=saved, data_files="*.jsonl")
    with pytest.raises(ValueError, match="either all addresses or all local files"):
        HuggingFace("json", base=saved, data_files=["https://example.org/a.jsonl", "b.jsonl"])
    write(saved / "a.jsonl", "broken")
    with pytest.raises(
        ValueError, match=r"cannot read the dataset 'json' \(split train\): .*check the files"
    ):
        list(HuggingFace("json", base=saved, data_files="a.jsonl", streaming=True).pieces())
    (saved / "saved" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read the dataset 'saved'"):
        list(HuggingFace("saved", base=saved).pieces())


def test_hub_dataset_without_network_gives_error(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from mixwell.data.sources import HuggingFace
source = HuggingFace("nobody/nothing", base=Path("."))
assert source.remote
try:
    list(source.pieces())
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.stdout.startswith("cannot read the dataset 'nobody/nothing' (split train): ")
    assert done.stdout.endswith("check its path; else its name, and the connection\n")
    assert done.stdout.count("\n") == 1


def test_hub_stream_fingerprints_depend_on_settings(tmp_path: Path) -> None:
    options = [{}, {"name": "en"}, {"split": "test"}, {"revision": "v1"}, {"limit": 3}, {"field": "body"}]
    sources = [HuggingFace("nobody/nothing", base=tmp_path, streaming=True, **one) for one in options]
    assert len({source.fingerprint() for source in sources}) == len(options)


# in memory


def test_texts() -> None:
    source = Texts(iter(DOCUMENTS), name="mine")
    assert documents(source) == documents(source) == DOCUMENTS
    assert source.size() == sum(piece.read for piece in source.pieces())
    assert next(source.pieces()) == Piece(DOCUMENTS[0], True, len(DOCUMENTS[0]))
    with pytest.raises(ValueError, match="mine: documents must be a list of strings, got one string"):
        Texts("text", name="mine")
    with pytest.raises(ValueError, match="mine, document 1: .* not text, got int 7"):
        Texts(["a", 7], name="mine")
    with pytest.raises(ValueError, match="mine, document 0: documents must be strings, got None"):
        Texts([None], name="mine")
