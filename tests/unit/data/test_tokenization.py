"""Arrays of tokens on disk are made once, whole or not at all, in little memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import PATIENCE
from mixwell.data import tokenization
from mixwell.data.overlap import shared_fraction
from mixwell.data.sources import Piece, Source, TextFiles, Texts
from mixwell.data.tokenization import TokenFile, open_tokens, tokenize
from mixwell.data.tokenizer import ByteTokenizer, TokenizerFile, train_tokenizer

DOCUMENTS = ["The first one.\nIt has two lines.", "", "zweites, mit Größe"]


class Counted(Source):
    """Says how often its text was read; breaks in the middle when told to."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__("counted")
        self.content, self.reads, self.broken, self.version = pieces, 0, False, "1"

    def pieces(self) -> Iterator[Piece]:
        self.reads += 1
        for piece in self.content:
            yield piece
            if self.broken:
                raise RuntimeError("broken")

    def fingerprint(self, cache: Path | None = None) -> str:
        return self.version

    def size(self) -> int | None:
        return None


def counted() -> Counted:
    return Counted([Piece("one ", False), Piece("document", True), Piece("", True), Piece("two", True)])


def names(cache: Path) -> list[str]:
    return sorted(path.suffix for path in (cache / "tokens").iterdir() if path.suffix != ".lock")


def test_documents_end_with_the_end_token(tmp_path: Path) -> None:
    made = tokenize(Texts(DOCUMENTS), ByteTokenizer(), cache=tmp_path)
    expected = [*DOCUMENTS[0].encode(), 256, *DOCUMENTS[2].encode(), 256]
    array = made.array()
    assert isinstance(array, np.memmap)
    assert array.tolist() == expected
    assert (made.tokens, made.documents, made.dtype) == (len(expected), 2, "<u2")
    assert made.text_bytes == len("".join(DOCUMENTS).encode())
    assert made.path.read_bytes() == np.array(expected, "<u2").tobytes()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_cached_tokens_are_not_read_again(tmp_path: Path) -> None:
    source = counted()
    first = tokenize(source, ByteTokenizer(), cache=tmp_path)
    assert ByteTokenizer().decode(first.array()) == "one document<|endoftext|>two<|endoftext|>"
    assert tokenize(source, ByteTokenizer(), cache=tmp_path) == first
    assert source.reads == 1
    assert names(tmp_path) == [".bin", ".json", ".npz"]


def test_cache_depends_on_tokenizer_and_text(tmp_path: Path) -> None:
    bpe = train_tokenizer([Texts(DOCUMENTS)], size=260, path=tmp_path / "bpe.json")
    made = [
        tokenize(Texts(documents), tokenizer, cache=tmp_path)
        for documents in (DOCUMENTS, DOCUMENTS[:1])
        for tokenizer in (ByteTokenizer(), bpe)
    ]
    assert len({one.path for one in made}) == len({one.digest for one in made}) == 4
    assert bpe.decode(made[3].array()) == DOCUMENTS[0] + "<|endoftext|>"


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokens = {"?": 0, "</s>": 1, "word": 100_000}
    content = {"version": "1.0", "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "?"}}
    (tmp_path / "words.json").write_text(json.dumps(content))
    made = tokenize(Texts(["word"]), TokenizerFile(tmp_path / "words.json"), cache=tmp_path)
    assert made.dtype == "<u4"
    assert made.array().tolist() == [100_000, 1]


def test_error_leaves_no_partial_files(tmp_path: Path) -> None:
    source = counted()
    source.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        tokenize(source, ByteTokenizer(), cache=tmp_path)
    assert names(tmp_path) == []
    source.broken = False
    assert tokenize(source, ByteTokenizer(), cache=tmp_path).documents == 2


KILLED = """
import os, sys
from pathlib import Path
from mixwell.data.sources import Piece, Texts
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer

class Killed(ByteTokenizer.__mro__[1]):
    size, end, identity = 257, 256, ByteTokenizer().identity
    def encode(self, texts):
        os.kill(os.getpid(), 9)
    def decode(self, ids):
        return ""

tokenize(Texts(["one", "two"]), Killed(), cache=Path(sys.argv[1]))
"""


def test_leftovers_of_killed_process_are_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert names(tmp_path) == [".part"]
    tokenize(Texts(["something else"]), ByteTokenizer(), cache=tmp_path)
    assert ".part" not in names(tmp_path)
    made = tokenize(Texts(["one", "two"]), ByteTokenizer(), cache=tmp_path)
    assert made.array().tolist() == [*b"one", 256, *b"two", 256]


@pytest.mark.parametrize("damage", ["short", "no array", "no facts", "half facts", "no sketch"])
@pytest.mark.filterwarnings("ignore:the cached tokens")
def test_damaged_arrays_are_rebuilt(tmp_path: Path, damage: str) -> None:
    source = counted()
    made = tokenize(source, ByteTokenizer(), cache=tmp_path)
    facts = made.path.with_suffix(".json")
    if damage == "short":
        made.path.write_bytes(made.path.read_bytes()[:-2])
    elif damage == "half facts":
        facts.write_text(facts.read_text()[:20])
    else:
        {"no array": made.path, "no facts": facts, "no sketch": made.path.with_suffix(".npz")}[
            damage
        ].unlink()
    assert tokenize(source, ByteTokenizer(), cache=tmp_path) == made
    assert source.reads == 2
    assert len(made.array()) == made.tokens


@pytest.mark.parametrize("documents", [[], [""], ["", ""]])
def test_empty_domains_raise(tmp_path: Path, documents: list[str]) -> None:
    with pytest.raises(
        ValueError, match="domain poems is empty: there is no text in it; add text, or leave it out"
    ):
        tokenize(Texts(documents, name="poems"), ByteTokenizer(), cache=tmp_path)
    assert names(tmp_path) == []


def test_domain_of_empty_file_warns_and_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with (
        pytest.warns(UserWarning, match="a.txt is empty"),
        pytest.raises(ValueError, match="domain a.txt is empty"),
    ):
        tokenize(TextFiles("a.txt", base=tmp_path), ByteTokenizer(), cache=tmp_path)


def test_text_changed_while_reading_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")

    def change(done: int) -> None:
        (tmp_path / "a.txt").write_text("another")

    source = TextFiles("a.txt", base=tmp_path)
    with pytest.raises(ValueError, match="a.txt changed while it was read; start again when it is complete"):
        tokenize(source, ByteTokenizer(), cache=tmp_path, progress=change)
    assert tokenize(source, ByteTokenizer(), cache=tmp_path).tokens == len("another") + 1


def test_progress_reaches_file_size(tmp_path: Path) -> None:
    told = list[int]()
    source = Texts(["größer" * 1000] * 2000)
    tokenize(source, ByteTokenizer(), cache=tmp_path, progress=told.append)
    assert len(told) > 1
    assert told == sorted(told)
    assert told[-1] == source.size()


TOGETHER = """
import sys, time
from pathlib import Path
from mixwell.data.sources import Texts
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer

def read(done):
    print("read")
    time.sleep(0.5)

made = tokenize(Texts(["one"]), ByteTokenizer(), cache=Path(sys.argv[1]), progress=read)
print(made.tokens)
"""


def test_two_processes_tokenize_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TOGETHER, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=PATIENCE)[0].split() for process in running)
    assert said == [["4"], ["read", "4"]]


PEAK = """
import sys
from pathlib import Path
from mixwell.data.sources import TextFiles
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer
here = Path(sys.argv[1])
made = tokenize(TextFiles(sys.argv[2], base=here), ByteTokenizer(), cache=here / "cache")
# getrusage would tell of the process that this one was forked from
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(made.tokens, peak.split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_file_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    letters = rng.choice(np.frombuffer(b"abcdefghijklmno    ", np.uint8), (1 << 14, 64))
    letters[:, -1] = ord("\n")
    lines = letters.tobytes()

    def peak(name: str, block: bytes, size: int) -> int:
        with (tmp_path / name).open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
        command = [sys.executable, "-c", PEAK, str(tmp_path), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        tokens, kilobytes = map(int, done.stdout.split())
        assert tokens == (tmp_path / name).stat().st_size + 1
        os.unlink(tmp_path / name)
        return kilobytes << 10

    small = peak("small.txt", lines, 2 << 20)
    assert peak("large.txt", lines, 200 << 20) - small < 120 << 20
    assert peak("line.txt", lines.replace(b"\n", b"x").replace(b" ", b"y"), 100 << 20) - small < 80 << 20


def test_overlap_of_texts_and_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["".join(chr(97 + i) for i in rng.integers(0, 26, 50)) for _ in range(400)]
    domain = tokenize(Texts(["\n".join(lines[:300])]), ByteTokenizer(), cache=tmp_path)
    validation = tokenize(Texts(["\n".join(lines[250:350])]), ByteTokenizer(), cache=tmp_path)
    assert shared_fraction(validation, domain) == pytest.approx(0.5, abs=0.02)
    # the same without the text, and at another place in the array
    np.save(tmp_path / "validation.npy", validation.array())
    bare = open_tokens(tmp_path / "validation.npy", vocabulary=257)
    assert bare.sketches is None
    assert shared_fraction(bare, domain) == pytest.approx(0.5, abs=0.1)
    assert shared_fraction(bare, validation) == 1


@pytest.mark.parametrize("end", ["\n", " "], ids=["short lines", "one long line"])
def test_plain_copies_and_excerpts_are_found(tmp_path: Path, end: str) -> None:
    rng = np.random.default_rng(0)

    def text() -> str:
        return end.join("".join(chr(97 + i) for i in rng.integers(0, 26, 12)) for _ in range(3000))

    first, second = text(), text()
    copied, excerpt, other, domain = (
        tokenize(Texts([one]), ByteTokenizer(), cache=tmp_path)
        for one in (first, first[1003:5000], second, first + end)
    )
    assert shared_fraction(copied, domain) == shared_fraction(excerpt, domain) == 1
    assert shared_fraction(other, domain) == 0


def test_short_documents_are_found_too(tmp_path: Path) -> None:
    documents = [f"document {i}" for i in range(1000)]
    domain = tokenize(Texts(documents), ByteTokenizer(), cache=tmp_path)
    validation = tokenize(Texts(documents[300:400]), ByteTokenizer(), cache=tmp_path)
    assert shared_fraction(validation, domain) == 1


def test_rewritten_file_with_same_size_and_time_is_read(tmp_path: Path) -> None:
    file, old = tmp_path / "a.txt", 10**18
    made = list[list[int]]()
    for text in ("one", "two"):
        file.write_text(text)
        os.utime(file, ns=(old, old))
        made.append(
            tokenize(TextFiles("a.txt", base=tmp_path), ByteTokenizer(), cache=tmp_path).array().tolist()
        )
    assert made == [[*b"one", 256], [*b"two", 256]]


def test_unwritable_cache_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "deep" / "cache"):
        with pytest.raises(
            ValueError,
            match=rf"cannot write to the cache of tokens, {cache / 'tokens'}: .*; set MIXWELL_CACHE to a folder",
        ):
            tokenize(Texts(["one"]), ByteTokenizer(), cache=cache)


@pytest.mark.parametrize(
    ("number", "ours"), [(errno.EROFS, True), (errno.ENOSPC, True), (errno.EIO, False)], ids=str
)
def test_other_disk_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ours: bool) -> None:
    def lock(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path) if number == errno.EROFS else None)

    monkeypatch.setattr(tokenization, "FileLock", lock)
    kind, message = (ValueError, "MIXWELL_CACHE") if ours else (OSError, "Input/output error")
    with pytest.raises(kind, match=message) as caught:
        tokenize(Texts(["one"]), ByteTokenizer(), cache=tmp_path)
    assert os.strerror(number) in str(caught.value)


# arrays made elsewhere


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int32", "int64"])
def test_external_token_arrays(tmp_path: Path, kind: str) -> None:
    tokens = np.arange(1000, dtype=kind)
    np.save(tmp_path / "a.npy", tokens)
    tokens.tofile(tmp_path / "a.bin")
    packed = open_tokens(tmp_path / "a.npy", vocabulary=1000)
    raw = open_tokens(tmp_path / "a.bin", dtype=kind, vocabulary=1000)
    for found in (packed, raw):
        assert isinstance(found.array(), np.memmap)
        assert found.array().tolist() == tokens.tolist()
        assert (found.tokens, found.documents, found.text_bytes) == (1000, None, None)
    assert packed.digest == raw.digest


def test_invalid_arrays_raise(tmp_path: Path) -> None:
    def saved(array: object) -> Path:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        return tmp_path / "a.npy"

    def refused(path: Path, message: str, dtype: str | None = None, vocabulary: int = 100) -> None:
        with pytest.raises(ValueError, match=message):
            open_tokens(path, dtype=dtype, vocabulary=vocabulary)

    refused(saved(np.ones(3)), "a.npy: tokens must be whole numbers, got float64; save them as uint16")
    refused(saved(np.ones((3, 2), int)), r"a.npy: tokens must be in one row, got the shape \(3, 2\); flatten")
    refused(saved(np.array(["x", None])), "a.npy is not an array of numbers")
    refused(saved(np.ones(3, "u2")), "a.npy holds uint16, but dtype is int32; leave dtype out", dtype="int32")
    large = np.zeros(3_000_000, np.int32)
    large[2_500_000] = 100
    refused(
        saved(large), "token 100 at position 2500000 is not in the vocabulary of 100; check the tokenizer"
    )
    large[7] = -1
    refused(saved(large), "token -1 at position 7 is not in the vocabulary of 100")
    raw = tmp_path / "a.bin"
    raw.write_bytes(b"abc")
    refused(raw, "a.bin is raw: its dtype must be one of uint16, uint32, int32, int64, got None")
    refused(raw, "a.bin is raw: its dtype must be one of .*, got float32", dtype="float32")
    refused(
        raw,
        "a.bin has 3 bytes, which is not a multiple of the size of uint16; check the dtype",
        dtype="uint16",
    )
    raw.write_bytes(b"")
    refused(raw, "a.bin has no tokens", dtype="uint16")
    refused(tmp_path / "missing.npy", "cannot read .*missing.npy: No such file")
    refused(tmp_path / "missing.bin", "cannot read .*missing.bin: No such file", dtype="uint16")
    (tmp_path / "b.npy").write_bytes(b"no array")
    refused(tmp_path / "b.npy", "b.npy is not an array of numbers")
    (tmp_path / "c.npy").touch()
    refused(tmp_path / "c.npy", "c.npy is not an array of numbers")
    np.save(tmp_path / "d.npy", np.empty(0, np.int32))
    refused(tmp_path / "d.npy", "d.npy has no tokens")


def test_opening_is_lazy(tmp_path: Path) -> None:
    assert TokenFile(tmp_path / "not there.bin", "<u2", 10, "digest").tokens == 10
