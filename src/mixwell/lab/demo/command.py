"""``mixwell demo``: the embedded default, learned weights beside uniform ones at the same compute."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mixwell.lab import arms
from mixwell.lab.demo import corpus
from mixwell.lab.tables import Row
from mixwell.report import arms as report
from mixwell.report import runs
from mixwell.training import config_io, mixture
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.sweeps import check_workers
from mixwell.utils import files
from mixwell.utils.terminal import say, show

CONFIG = "demo.yaml"


def main(
    *,
    out: Path,
    steps: int | None,
    seeds: int,
    workers: int | None,
    figures: bool,
    engine: Engine = LOCAL,
) -> None:
    """Write the text, train both ways, compare and draw.

    Args:
        out: folder for everything.
        steps: of each run; ``None`` for the config's.
        seeds: how many pairs of runs.
        workers: how many runs at a time; ``None`` for one per core.
        figures: whether to write the report page.
        engine: where they are done.

    Raises:
        ValueError: a number is below one.
    """
    check_workers(workers, engine)
    if seeds < 1:
        raise ValueError(f"the demo needs at least 1 seed, got {seeds}")
    console = Console()
    if not (out / "data" / f"{corpus.TEST}.txt").exists():
        say(console, f"writing text from this Python installation to {out / 'data'}")
        corpus.write(out / "data")
    if not (out / CONFIG).exists():
        files.write_atomically(out / CONFIG, default_config())
    base = config_io.read(out / CONFIG, [] if steps is None else [f"steps={steps}"])
    say(
        console,
        f"{seeds} x 2 runs of {base.steps} steps: learned and uniform weights; the target is docstrings",
    )
    rows = arms.run(
        base,
        [arms.LEARNED, arms.UNIFORM],
        seeds=seeds,
        out=out,
        workers=workers,
        console=console,
        engine=engine,
    )
    _tell(console, rows, out)
    if figures:
        for row in rows:
            folder = _run(out, row)
            runs.write([folder], folder)
        say(console, f"look at {report.write(out, out)[-1]}")


def default_config() -> str:
    """The config of the demo, as it is written for users to read and change."""
    return resources.files("mixwell.lab.demo").joinpath(CONFIG).read_text("utf-8")


def _tell(console: Console, rows: Sequence[Row], out: Path) -> None:
    column, label = report.loss_column(rows)
    table = Table("arm", "seed", label, "weights at the end", box=None)
    for row in rows:
        artifact = mixture.read(_run(out, row))
        last = "  ".join(f"{name} {weight:.2f}" for name, weight in artifact["weights"]["last"].items())
        table.add_row(str(row["arm"]), str(row["seed"]), f"{row[column]:.4f}", last)
    show(console, table)
    for line in report.findings(rows):
        say(console, line)


def _run(out: Path, row: Row) -> Path:
    return arms.folder(out, str(row["arm"]), int(row["seed"]))
