"""The report that fits what is in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixwell.experiments.bounds.cells import MEASUREMENTS
from mixwell.experiments.mnist.sweep import RUNS
from mixwell.report import bounds, mnist


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures and write the report of folders of results.

    Args:
        folders: of MNIST runs, one or several; or one of bounds.
        out: where to.

    Returns:
        The files.

    Raises:
        ValueError: a folder has no results, or they do not go together.
    """
    for folder in folders:
        if not any((folder / name).exists() for name in (RUNS, MEASUREMENTS)):
            raise ValueError(f"{folder} has no results: neither {RUNS} nor {MEASUREMENTS} is in it")
    if not any((folder / MEASUREMENTS).exists() for folder in folders):
        return mnist.write(folders, out)
    if len(folders) > 1:
        raise ValueError("results of bounds cannot be joined with others; give their folder alone")
    return bounds.write(folders[0], out)
