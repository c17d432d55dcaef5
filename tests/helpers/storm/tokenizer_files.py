"""Malformed tokenizer files."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.storm.cases import VALUES, Case, delete_at, mutated, paths_in, replace_at, small_config

KIND = "tokenizers"
LETTERS = " abcdefghijklmnopqrstuvwxyz+-*/()=."
PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
    "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[a-z]+|."}, "behavior": "Isolated", "invert": False},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": {"<|endoftext|>": 0, **{letter: n + 1 for n, letter in enumerate(LETTERS)}, "al": 36}, "merges": [["a", "l"]]},
}  # fmt: skip


def cases(seed: int, *, values: int = 25, mutations: int = 10) -> list[Case]:
    """Return chosen files, and random changes of a valid one."""
    found = _chosen() + _places()
    for number in range(values):
        own = random.Random(f"{KIND} {seed} {number}")
        plain = copy.deepcopy(PLAIN)
        path = own.choice(
            [one for one in paths_in(plain) if len(one) < 3 or one[1] != "vocab" or own.random() < 0.1]
        )
        if own.random() < 0.25:
            delete_at(plain, path)
        else:
            replace_at(
                plain,
                path,
                own.choice([value for value in VALUES if not isinstance(value, dict) or 1 not in value]),
            )
        found.append(_case(f"value {number} at {path}", lambda plain=plain: json.dumps(plain).encode()))
    for number in range(mutations):
        own = random.Random(f"{KIND} bytes {seed} {number}")
        content = mutated(json.dumps(PLAIN).encode(), own)
        found.append(_case(f"bytes {number}", lambda content=content: content))
    return found


def _changed(path: tuple[Any, ...], value: Any) -> Callable[[], bytes]:
    plain = copy.deepcopy(PLAIN)
    replace_at(plain, path, value)
    return lambda: json.dumps(plain).encode()


def _regex(pattern: str) -> Callable[[], bytes]:
    return _changed(("pre_tokenizer", "pattern", "Regex"), pattern)


def _chosen() -> list[Case]:
    vocabulary = PLAIN["model"]["vocab"]
    changes: dict[str, Callable[[], bytes]] = {
        "as it should be": lambda: json.dumps(PLAIN).encode(),
        "gap": _changed(("model", "vocab"), {**vocabulary, "al": 1000}), "large gap": _changed(("model", "vocab"), {**vocabulary, "al": 2**31}), "largest gap": _changed(("model", "vocab"), {**vocabulary, "al": 2**32 - 1}), "beyond": _changed(("model", "vocab"), {**vocabulary, "al": 2**40}),
        "same ids": _changed(("model", "vocab"), dict.fromkeys(vocabulary, 0)), "added id": _changed(("added_tokens", 0, "id"), 2**32 - 1), "no end": _changed(("added_tokens",), []), "empty vocabulary": _changed(("model", "vocab"), {}), "one token": _changed(("model", "vocab"), {"<|endoftext|>": 0}),
        "bad merges": _changed(("model", "merges"), [["q", "nothing"]]), "exploding regex": _regex("((a|b|[a-z])+)+$"), "exploding lines": _regex("(.*)*x$"), "backtracking": _regex("(a?){30}a{30}|([a-z ]+)+!"), "back reference": _regex("(.*)\\1\\1z"), "empty regex": _regex(""), "matches nothing": _regex("(?=x)"), "open regex": _regex("("),
        "repeated": _regex("(((a{1000}){1000}){1000})"), "nested regex": _regex("(" * 5000 + ")" * 5000), "nested": lambda: b"[" * 100_000, "nested closed": lambda: b"[" * 100_000 + b"]" * 100_000, "empty": lambda: b"", "null": lambda: b"null", "object": lambda: b"{}", "not UTF-8": lambda: b"\xff\xfe", "nul": lambda: b"\0" * 100, "text": lambda: b"hello",
        "unknown model": _changed(("model", "type"), "X"), "word level": _changed(("model",), {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "alpha": 1}, "unk_token": "nothing"}), "unigram": _changed(("model",), {"type": "Unigram", "unk_id": 5, "vocab": [["<|endoftext|>", 0.0]]}), "unigram nan": _changed(("model",), {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", float("nan")], ["a", -1e308]]}), "truncation": _changed(("truncation",), {"max_length": 2**62, "stride": 2**62, "strategy": "LongestFirst", "direction": "Right"}),
        "padding": _changed(("padding",), {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}), "replace normalizer": _changed(("normalizer",), {"type": "Replace", "pattern": {"Regex": ""}, "content": "aaaa"}), "doubling": _changed(("normalizer",), {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 40}), "everything removed": _changed(("normalizer",), {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}),
        "word piece": _changed(("model",), {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": {"<|endoftext|>": 0}}),
    }  # fmt: skip
    return [_case(name, content) for name, content in changes.items()]


def _case(name: str, content: Callable[[], bytes]) -> Case:
    def write(folder: Path) -> list[str]:
        small_config(folder, tokenizer="odd.json")
        (folder / "odd.json").write_bytes(content())
        return ["run", "tiny.yaml", "--no-report"]

    return Case(KIND, name, write)


def _places() -> list[Case]:
    makers: dict[str, Callable[[Path], Any]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "loop": lambda path: os.symlink(path.name, path),
        "absent": lambda path: None,
        "/dev/zero": lambda path: os.symlink("/dev/zero", path),
        "/dev/null": lambda path: os.symlink("/dev/null", path),
        "folder with a fifo": lambda path: (path.mkdir(), os.mkfifo(path / "tokenizer.json")),
    }

    def case(name: str, make: Callable[[Path], Any], command: str) -> Case:
        def write(folder: Path) -> list[str]:
            small_config(folder, tokenizer="odd.json")
            make(folder / "odd.json")
            return [command, "tiny.yaml"]

        return Case(KIND, f"{command}, {name}", write)

    found = [case(name, make, command) for name, make in makers.items() for command in ("plan", "run")]
    for spec in ("~nobody/x", "~no_such_user/x", "a\0b", "", "/", "é" * 300):
        found.append(
            Case(
                KIND,
                f"tokenizer {spec[:20]!r}",
                lambda folder, spec=spec: (small_config(folder, tokenizer=spec), ["plan", "tiny.yaml"])[1],
            )
        )
    return found
