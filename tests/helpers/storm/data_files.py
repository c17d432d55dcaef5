"""Damaged and malformed data files."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save

from helpers.storm.cases import Case, mutated, plain_config

KIND = "data files"
CNN: dict[str, Any] = {"kind": "cnn", "classes": 3, "channels": 2}


def cases(seed: int, *, mutations: int = 10) -> list[Case]:
    """Return specific cases of each format, and random changes of valid files."""
    found = _texts() + _json_lines() + _tokens() + _tensors() + _parquet() + _places()
    for name, (make, section) in _formats().items():
        for number in range(mutations):
            state = random.Random(f"{KIND} {name} {seed} {number}").random()
            found.append(
                _case(
                    f"{name} bytes {number}",
                    name,
                    lambda make=make, state=state: mutated(make(), random.Random(state)),
                    section,
                )
            )
    return found


def _case(
    name: str,
    file: str,
    content: Callable[[], bytes],
    section: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
) -> Case:
    def write(folder: Path) -> list[str]:
        (folder / file).write_bytes(content())
        return _write(folder, section, model)

    return Case(KIND, name, write)


def _write(folder: Path, section: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> list[str]:
    plain = plain_config(folder)
    plain["domains"]["letters"] = dict(section)
    if "tensors" in section:
        (folder / "good.safetensors").write_bytes(_images())
        good = {"tensors": "good.safetensors"}
        plain |= {
            "domains": {"odd": dict(section), "good": good},
            "validation": good,
            "model": dict(model or CNN),
        }
    (folder / "data.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    return ["run", "data.yaml", "--no-report"]


def _words(count: int = 300) -> str:
    return " ".join(random.Random(0).choice(["alpha", "beta", "gamma"]) for _ in range(count))


def _lines() -> bytes:
    return b"".join(json.dumps({"text": _words(30), "n": n}).encode() + b"\n" for n in range(10))


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _images(**changes: Any) -> bytes:
    tensors = {"inputs": torch.rand(20, 1, 28, 28), "targets": torch.arange(20) % 3}
    return save({k: v.contiguous() for k, v in (tensors | changes).items() if v is not None})


def _table(column: Any, **options: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), sink, **options)
    return sink.getvalue()


def _formats() -> dict[str, tuple[Callable[[], bytes], dict[str, Any]]]:
    return {
        "d.txt": (lambda: _words().encode(), {"files": "d.txt"}),
        "d.jsonl": (_lines, {"jsonl": "d.jsonl"}),
        "d.jsonl.gz": (lambda: gzip.compress(_lines(), mtime=0), {"jsonl": "d.jsonl.gz"}),
        "d.npy": (lambda: _npy(np.arange(200, dtype=np.uint16)), {"tokens": "d.npy"}),
        "d.bin": (lambda: np.arange(200, dtype="<u2").tobytes(), {"tokens": "d.bin", "dtype": "uint16"}),
        "d.safetensors": (_images, {"tensors": "d.safetensors"}),
        "d.parquet": (lambda: _table([_words(30)] * 10), {"parquet": "d.parquet"}),
    }


def _texts() -> list[Case]:
    contents: dict[str, bytes] = {
        "empty": b"", "spaces": b" " * 100, "nul": b"a\0b" * 100, "binary": bytes(range(256)) * 4, "half a character": ("é" * 200).encode()[:-1],
        "utf-16": _words().encode("utf-16"), "one letter": b"a", "no line ends": b"a" * 6_000_000, "surrogates": b"\xed\xa0\x80" * 100, "mark": b"\xef\xbb\xbf" * 30,
    }  # fmt: skip
    found = [
        _case(f"text {name}", "d.txt", lambda content=content: content, {"files": "d.txt"})
        for name, content in contents.items()
    ]
    for encoding in (
        "utf-16",
        "ascii",
        "idna",
        "rot13",
        "base64",
        "punycode",
        "unicode_escape",
        "undefined",
        "x" * 500,
        "utf-7",
        "cp037",
        "utf-8\0",
    ):
        found.append(
            _case(
                f"text as {encoding[:20]!r}",
                "d.txt",
                lambda: (_words() + "é").encode(),
                {"files": "d.txt", "encoding": encoding},
            )
        )
    return found


def _json_lines() -> list[Case]:
    lines: dict[str, bytes] = {
        "null": b"null\n", "list": b"[1]\n", "number": b"3\n", "no field": b'{"a": "b"}\n', "number text": b'{"text": 3}\n', "null text": b'{"text": null}\n' * 5,
        "list text": b'{"text": ["a"]}\n', "nested": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "open": b'{"text": ' + b"[" * 100_000, "long number": b'{"text": ' + b"9" * 5000 + b"}\n",
        "surrogate": b'{"text": "\\ud800"}\n', "nan": b'{"text": NaN}\n', "nul": b'{"text": "a\\u0000b"}\n' * 30, "raw nul": b'{"text": "a\0b"}\n', "empty": b"", "blank": b"\n\n\n", "twice": b'{"text": "a", "text": 3}\n',
        "not utf-8": b'{"text": "\xff"}\n', "one line": b'{"text": "' + b"a" * 3_000_000 + b'"}\n', "utf-16": _lines().decode().encode("utf-16"), "array of objects": b'[{"text": "a"}]',
    }  # fmt: skip
    found = [
        _case(f"jsonl {name}", "d.jsonl", lambda content=content: content, {"jsonl": "d.jsonl"})
        for name, content in lines.items()
    ]
    section = {"jsonl": "d.jsonl.gz"}
    found += [
        _case("gzip bomb, one line", "d.jsonl.gz", _bomb, section),
        _case("gzip bomb, a document", "d.jsonl.gz", lambda: _bomb(b'{"text": "', b'"}\n'), section),
        _case("gzip in gzip", "d.jsonl.gz", lambda: gzip.compress(gzip.compress(_lines())), section),
        _case("gzip of nothing", "d.jsonl.gz", lambda: gzip.compress(b""), section),
        _case("gzip header only", "d.jsonl.gz", lambda: b"\x1f\x8b", section),
        _case("gzip and more", "d.jsonl.gz", lambda: gzip.compress(_lines()) + b"more", section),
        _case("gzip as text", "d.gz", lambda: gzip.compress(_lines()), {"files": "d.gz"}),
    ]
    for field in ("", "nothing", "é", "n", "a\nb"):
        found.append(_case(f"jsonl field {field!r}", "d.jsonl", _lines, {"jsonl": "d.jsonl", "field": field}))
    return found


def _bomb(before: bytes = b"", after: bytes = b"") -> bytes:
    """1.5 GB of one letter in 1.5 MB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b"a" * (1 << 20)
    # Whole blocks flushed alike are packed alike, so that only one of them has to be packed.
    head = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    packer.compress(block)
    own = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = own.compress(block) + own.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    return head + one * 1500 + last.compress(after) + last.flush()


def _tokens() -> list[Case]:
    arrays: dict[str, Any] = {
        "floats": np.ones(100), "two rows": np.ones((10, 10), np.uint16), "negative": -np.ones(100, np.int32), "too large": np.full(100, 60000, np.uint16), "scalar": np.uint16(3), "empty": np.ones(0, np.uint16),
        "objects": np.array([None, "a"] * 50), "texts": np.array(["a"] * 100), "bool": np.ones(100, bool), "complex": np.ones(100, complex), "dates": np.zeros(100, "M8[s]"), "records": np.zeros(100, [("a", "u2")]),
        "int8": np.ones(100, np.int8), "uint64": np.full(100, 2**63, np.uint64), "big endian": np.ones(100, ">u2"), "few": np.ones(3, np.uint16), "void": np.zeros(100, "V8"),
    }  # fmt: skip
    found = [
        _case(f"npy {name}", "d.npy", lambda array=array: _npy(array), {"tokens": "d.npy"})
        for name, array in arrays.items()
    ]
    header = b"\x93NUMPY\x01\x00\x76\x00"
    huge = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000000000,), }"
    found += [
        _case(
            "npy that claims to be huge",
            "d.npy",
            lambda: header + huge.ljust(117) + b"\n",
            {"tokens": "d.npy"},
        ),
        _case(
            "npy with nested header",
            "d.npy",
            lambda: header + (b"(" * 100).ljust(117) + b"\n",
            {"tokens": "d.npy"},
        ),
        _case(
            "npy with a long header",
            "d.npy",
            lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\x7f",
            {"tokens": "d.npy"},
        ),
        _case("bin of 3 bytes", "d.bin", lambda: b"abc", {"tokens": "d.bin", "dtype": "uint16"}),
        _case("bin without dtype", "d.bin", lambda: b"abcd", {"tokens": "d.bin"}),
        _case("bin as int64", "d.bin", lambda: b"\xff" * 800, {"tokens": "d.bin", "dtype": "int64"}),
        _case("bin empty", "d.bin", lambda: b"", {"tokens": "d.bin", "dtype": "int64"}),
    ]
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(100, dtype=np.uint16))
    found.append(_case("npz", "d.npz", buffer.getvalue, {"tokens": "d.npz"}))
    found.append(_case("npz named npy", "d.npy", buffer.getvalue, {"tokens": "d.npy"}))
    return found


def _tensors() -> list[Case]:
    n = 20
    changes: dict[str, dict[str, Any]] = {
        "double": {"inputs": torch.rand(n, 1, 28, 28, dtype=torch.float64)}, "half": {"inputs": torch.rand(n, 1, 28, 28).half()}, "integers": {"inputs": torch.ones(n, 1, 28, 28, dtype=torch.long)},
        "bytes": {"inputs": torch.ones(n, 1, 28, 28, dtype=torch.uint8)}, "flat": {"inputs": torch.rand(n, 784)}, "three channels": {"inputs": torch.rand(n, 3, 28, 28)}, "larger": {"inputs": torch.rand(n, 1, 31, 29)},
        "no channel": {"inputs": torch.rand(n, 28, 28)}, "scalar": {"inputs": torch.rand(())}, "no rows": {"inputs": torch.rand(0, 1, 28, 28), "targets": torch.ones(0, dtype=torch.long)}, "no pixels": {"inputs": torch.rand(n, 1, 0, 0)},
        "one": {"inputs": torch.rand(n, 1, 1, 1)}, "other rows": {"targets": torch.zeros(3, dtype=torch.long)}, "class 3": {"targets": torch.full((n,), 3)}, "class -1": {"targets": torch.full((n,), -1)}, "class -100": {"targets": torch.full((n,), -100)},
        "float targets": {"targets": torch.rand(n)}, "int targets": {"targets": torch.zeros(n, dtype=torch.int32)}, "bool targets": {"targets": torch.zeros(n, dtype=torch.bool)}, "two targets": {"targets": torch.zeros(n, 2, dtype=torch.long)},
        "column targets": {"targets": torch.zeros(n, 1, dtype=torch.long)}, "one hot": {"targets": torch.eye(3)[torch.zeros(n, dtype=torch.long)]}, "nan": {"inputs": torch.full((n, 1, 28, 28), float("nan"))}, "inf": {"inputs": torch.full((n, 1, 28, 28), float("inf"))},
        "large": {"inputs": torch.full((n, 1, 28, 28), 3e38)}, "complex": {"inputs": torch.ones(n, 1, 28, 28, dtype=torch.complex64)}, "no targets": {"targets": None}, "no inputs": {"inputs": None}, "more": {"weights": torch.ones(3)},
        "bool inputs": {"inputs": torch.ones(n, 1, 28, 28, dtype=torch.bool)}, "bfloat16": {"inputs": torch.rand(n, 1, 28, 28).bfloat16()}, "huge class": {"targets": torch.full((n,), 2**62)},
    }  # fmt: skip
    found = [
        _case(
            f"tensors {name}", "d.safetensors", lambda one=one: _images(**one), {"tensors": "d.safetensors"}
        )
        for name, one in changes.items()
    ]
    long = (2**40).to_bytes(8, "little")
    for name, content in {
        "not safetensors": b"abc",
        "empty": b"",
        "long header": long + b"{}",
        "null header": (4).to_bytes(8, "little") + b"null",
        "pickle": b"\x80\x04N.",
    }.items():
        found.append(
            _case(
                f"tensors {name}",
                "d.safetensors",
                lambda content=content: content,
                {"tensors": "d.safetensors"},
            )
        )
    for key, value in {"classes": 10**12, "channels": 10**9, "channels ": 10**30, "classes ": 1}.items():
        found.append(
            _case(
                f"cnn {key}={value}",
                "d.safetensors",
                _images,
                {"tensors": "d.safetensors"},
                CNN | {key.strip(): value},
            )
        )
    # Images for a language model, and text for a network of images.
    found.append(
        _case(
            "tensors for a gpt",
            "d.safetensors",
            _images,
            {"tensors": "d.safetensors"},
            {"kind": "gpt", "layers": 1, "heads": 2, "width": 8, "context": 8},
        )
    )
    found.append(
        _case(
            "float tokens for a gpt",
            "d.safetensors",
            lambda: _images(inputs=torch.rand(20, 9)),
            {"tensors": "d.safetensors"},
            {"kind": "gpt", "layers": 1, "heads": 2, "width": 8, "context": 8},
        )
    )
    return found


def _parquet() -> list[Case]:
    columns: dict[str, Any] = {
        "numbers": [1, 2], "nulls": [None, None], "lists": [["a"]], "objects": [{"a": 1}], "binary": [b"a"], "empty": [], "empty texts": ["", ""], "bool": [True], "mixed nulls": [None, _words(), None],
    }  # fmt: skip
    found = [
        _case(f"parquet {name}", "d.parquet", lambda column=column: _table(column), {"parquet": "d.parquet"})
        for name, column in columns.items()
    ]
    for name, content in {
        "not parquet": b"abc",
        "no content": b"",
        "magic": b"PAR1",
        "magic twice": b"PAR1PAR1",
        "negative footer": b"PAR1" + b"\xff" * 8 + b"PAR1",
    }.items():
        found.append(
            _case(f"parquet {name}", "d.parquet", lambda content=content: content, {"parquet": "d.parquet"})
        )
    found.append(
        _case(
            "parquet field", "d.parquet", lambda: _table(["a"]), {"parquet": "d.parquet", "field": "nothing"}
        )
    )
    found.append(
        _case(
            "parquet bomb",
            "d.parquet",
            lambda: _table(["a" * (1 << 26)] * 2, compression="zstd"),
            {"parquet": "d.parquet"},
        )
    )
    return found


def _places() -> list[Case]:
    makers: dict[str, Callable[[Path], Any]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "loop": lambda path: os.symlink(path.name, path),
        "dangling link": lambda path: os.symlink("nothing", path),
        "device": lambda path: os.symlink("/dev/zero", path),
        "null": lambda path: os.symlink("/dev/null", path),
        "absent": lambda path: None,
    }
    sections: dict[str, dict[str, Any]] = {
        "files": {"files": "odd"}, "jsonl": {"jsonl": "odd"}, "parquet": {"parquet": "odd"}, "npy": {"tokens": "odd.npy"}, "bin": {"tokens": "odd", "dtype": "uint16"}, "tensors": {"tensors": "odd"},
    }  # fmt: skip
    found: list[Case] = []
    for source, section in sections.items():
        for name, make in makers.items():

            def write(
                folder: Path, make: Callable[[Path], Any] = make, section: dict[str, Any] = section
            ) -> list[str]:
                make(folder / next(value for value in section.values() if value.startswith("odd")))
                return _write(folder, section)

            found.append(Case(KIND, f"{source}, {name}", write))
        for path in ("~nobody/x", "~no_such_user/x", "a\0b", "", ".", "/", "é" * 300):
            key = next(iter(section))
            if (key, path) not in {
                ("files", "/"),
                ("jsonl", "/"),
                ("parquet", "/"),
            }:  # which are read, and take long
                found.append(
                    Case(
                        KIND,
                        f"{source} {path[:20]!r}",
                        lambda folder, section={**section, key: path}: _write(folder, section),
                    )
                )
    return found
