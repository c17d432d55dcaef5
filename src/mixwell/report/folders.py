"""Write the report that fits the contents of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixwell.lab.bounds.cells import MEASUREMENTS
from mixwell.lab.compare.results import RUNS as COMPARISON
from mixwell.lab.mnist.sweep import RUNS as MNIST_RUNS
from mixwell.lab.quadratic.command import TABLE as QUADRATIC
from mixwell.report import bounds, compare, mnist, quadratic, runs
from mixwell.training import metrics

SINGLE = {
    COMPARISON: compare.write_report,
    MEASUREMENTS: bounds.write_report,
    QUADRATIC: quadratic.write_report,
}
"""Reports of one folder, by the file that it has."""


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures and write the report of folders of results; return the files, the page last.

    Args:
        folders: directories of runs, or folders of MNIST sweeps, one or several of a kind; or one folder of
            another experiment.

    Raises:
        ValueError: A folder has no results, or they cannot be combined.
    """
    for file, write_one in SINGLE.items():
        found = [folder for folder in folders if (folder / file).exists()]
        if found and len(folders) > 1:
            raise ValueError(f"{found[0]} has {file}, which cannot be combined with other folders")
        if found:
            return write_one(found[0], out)
    for file, write_all in ((metrics.FILE, runs.write_report), (MNIST_RUNS, mnist.write_report)):
        if folders and all((folder / file).exists() for folder in folders):
            return write_all(folders, out)
    known = (metrics.FILE, MNIST_RUNS, *SINGLE)
    for folder in folders:
        if not any((folder / file).exists() for file in known):
            raise ValueError(f"{folder} has no results: there is none of {', '.join(known)} in it")
    raise ValueError("training runs and MNIST sweeps cannot be combined in one report")
