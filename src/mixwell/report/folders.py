"""The report that fits what is in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixwell.lab.arms import RUNS as ARMS
from mixwell.lab.bounds.cells import MEASUREMENTS
from mixwell.lab.mnist.sweep import RUNS
from mixwell.report import arms, bounds, compare, mnist, runs
from mixwell.training import metrics


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures and write the report of folders of results.

    Args:
        folders: directories of runs, one or several; of MNIST sweeps, one or several; or one of bounds, of
            ``mixwell demo`` or of ``mixwell compare``.
        out: where to.

    Returns:
        The files.

    Raises:
        ValueError: a folder has no results, or they do not go together.
    """
    if folders and all((folder / metrics.FILE).exists() for folder in folders):
        return runs.write(folders, out)
    if len(folders) == 1 and (folders[0] / ARMS).exists():
        return arms.write(folders[0], out)
    if len(folders) == 1 and (folders[0] / compare.RUNS).exists():
        return compare.write(folders[0], out)
    for folder in folders:
        if (folder / compare.RUNS).exists():
            raise ValueError(f"{folder} is a comparison, which cannot be joined with others; give it alone")
        if (folder / metrics.FILE).exists():
            raise ValueError(
                f"{folder} is a training run; its report cannot be joined with one of experiments"
            )
        if not any((folder / name).exists() for name in (RUNS, MEASUREMENTS)):
            looked_for = f"{metrics.FILE}, {RUNS}, {compare.RUNS} or {MEASUREMENTS}"
            raise ValueError(f"{folder} has no results: there is no {looked_for} in it")
    if not any((folder / MEASUREMENTS).exists() for folder in folders):
        return mnist.write(folders, out)
    if len(folders) > 1:
        raise ValueError("results of bounds cannot be joined with others; give their folder alone")
    return bounds.write(folders[0], out)
