"""How fast files are compared with their checksums: ``python bench/checksums.py``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from mixwell.utils import checksums

MEGABYTES = 512


def main() -> None:
    """Hash a file that is in the page cache, with one thread and with all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        path.write_bytes(np.random.default_rng(0).bytes(MEGABYTES << 20))
        for threads in (1, checksums.THREADS):
            checksums.THREADS = threads
            begun = time.perf_counter()
            checksums.file_checksum(path)
            rate = MEGABYTES / 1024 / (time.perf_counter() - begun)
            print(f"{threads} threads: {rate:.2f} GiB/s")


if __name__ == "__main__":
    main()
