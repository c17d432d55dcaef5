"""``mixwell compare``: train several methods with the same seeds, data and compute, and compare their losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console

from mixwell.lab import problems, tables
from mixwell.lab.compare import budgets, results
from mixwell.lab.compare.results import ComparedRun
from mixwell.lab.compare.standings import standings
from mixwell.lab.compare.summary import summary, verdict
from mixwell.lab.compare.variants import Variant, choose, notes_on_settings, parse_horizons
from mixwell.lab.tables import Row
from mixwell.training import concurrent, config_io, metrics
from mixwell.training.concurrent import Planned
from mixwell.training.config import Config
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.run import Run, finished
from mixwell.training.sweeps import check_workers
from mixwell.utils import environment
from mixwell.utils.files import lock_folder
from mixwell.utils.terminal import say

TERMINAL_COLUMNS = (
    ("method", "rank", "T", "loss", "steps", "vs. uniform"),
    ("method", "compute", "seconds", "MiB", "weights"),
)
"""Two tables, one below the other, since terminals are narrow; the report page has all columns."""


@final
@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Args:
        rows: rows of ``compare.csv``; empty if no run is finished.
        error: raised by the runs, if they failed or were interrupted.
    """

    folder: Path
    rows: Sequence[Row]
    error: Exception | None

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


def main(
    problem: str,
    *,
    names: Sequence[str],
    seeds: int,
    horizons: str = "own",
    equal: str = "compute",
    out: Path | None,
    workers: int | None,
    overrides: Sequence[str] = (),
    engine: Engine = LOCAL,
) -> Comparison:
    """Run everything that is not finished yet, write the tables and print them.

    Args:
        problem: path of a config, or name of an embedded problem.
        names: methods, entries of ``compare`` in the config, or ``all``.
        seeds: number of seeds, from 0.
        horizons: horizons of the online methods, separated by commas.
        equal: ``compute``, or ``steps`` of the last run.
        out: ``None`` for ``runs/compare-`` and the problem's name.
        workers: number of concurrent runs; ``None`` for one per core.
        overrides: ``key=value``.

    Raises:
        ValueError: A setting is wrong, or a method lacks a requirement.
    """
    check_workers(workers, engine)
    if seeds < 1:
        raise ValueError(f"a comparison needs at least 1 seed, got {seeds}")
    if equal not in ("compute", "steps"):
        raise ValueError(f"--equal must be compute or steps, got {equal!r}")
    if not names:
        raise ValueError("--methods names none; `mixwell methods` lists them")
    console = Console()
    out = out or Path("runs") / f"compare-{Path(problem).stem}"
    if (out / metrics.FILE).exists():
        raise ValueError(f"{out} is the directory of a training run; choose another --out")
    base = config_io.read_config(problems.find(problem, out, console), overrides)
    if base.validation is None and base.test is None:
        raise ValueError("a comparison needs something to compare by: give `validation` or `test`")
    chosen, refused = choose(base, names, parse_horizons(horizons))
    if equal == "compute":
        chosen, too_expensive = _affordable(base, chosen, console)
        refused |= too_expensive
    for name, reason in refused.items():
        say(console, f"left out: {name} ({reason})")
    for note in notes_on_settings(base, chosen):
        say(console, f"warning: {note}")
    runs = _runs(chosen, seeds, out, budget=float(base.steps) if equal == "compute" else None)
    failed: Exception | None = None
    with lock_folder(out):
        environment.write(out)
        try:
            concurrent.run_all(
                # The progress bar counts everything that is computed, in training steps.
                [
                    Planned(run.config, run.folder, max(run.config.steps, int(run.budget or 0)))
                    for run in runs
                ],
                workers=workers,
                unfinished=out / "unfinished",
                console=console,
                engine=engine,
            )
        except (ChildProcessError, InterruptedError) as error:  # the finished runs are reported nevertheless
            failed = error
        done = [run for one in chosen for run in runs if run.variant is one and finished(run.folder)]
        rows = results.write_tables(out, done, _failures(out, runs, refused))
    if rows:
        _print(out, rows, console)
    return Comparison(out, rows, failed)


def _affordable(
    base: Config, chosen: Sequence[Variant], console: Console
) -> tuple[list[Variant], dict[str, str]]:
    """Give each variant the steps that the budget pays for; also return why some cannot train at all."""
    _, rows = Run(base, Path(), console=console).load()
    sizes = {name: len(own) for name, own in rows.domains.items()}
    held_out = 0 if rows.validation is None else len(rows.validation)
    found: list[Variant] = []
    refused: dict[str, str] = {}
    for one in chosen:
        try:
            config = budgets.affordable(one.config, sizes, held_out, budget=base.steps)
            found.append(replace(one, config=config))
        except ValueError as error:
            if one.requested:
                raise
            refused[one.name] = str(error)
    return found, refused


def _runs(chosen: Sequence[Variant], seeds: int, out: Path, *, budget: float | None) -> list[ComparedRun]:
    """Return the runs seed by seed, so that an interrupted comparison has something to compare."""
    folders = [re.sub(r"[^a-zA-Z0-9._-]+", "-", one.name) for one in chosen]
    for one, folder in zip(chosen, folders, strict=True):
        if folders.count(folder) > 1:
            raise ValueError(
                f"{one.name!r} and another entry would share runs/{folder}-0; rename it in `compare`"
            )
    return [
        ComparedRun(
            one,
            seed,
            config_io.validate_config({**one.config.model_dump(mode="json"), "seed": seed}, where=one.name),
            out / "runs" / f"{folder}-{seed}",
            budget,
        )
        for seed in range(seeds)
        for one, folder in zip(chosen, folders, strict=True)
    ]


def _failures(out: Path, runs: Sequence[ComparedRun], refused: dict[str, str]) -> list[Row]:
    found: list[Row] = [{"variant": name, "seed": "", "reason": reason} for name, reason in refused.items()]
    for run in runs:
        report = out / "unfinished" / f"{run.folder.name}.failed.txt"
        if not finished(run.folder) and report.exists():
            last = report.read_text(encoding="utf-8").strip().splitlines()[-1]
            found.append({"variant": run.variant.name, "seed": run.seed, "reason": last})
    return found


def _print(out: Path, rows: Sequence[Row], console: Console) -> None:
    cells = summary(standings(rows, tables.read(out / results.WEIGHTS)))
    for columns in TERMINAL_COLUMNS:
        tables.show(console, columns, [[row[name] for name in columns] for row in cells])
        say(console, "")
    say(console, verdict(rows))
    say(console, f"{out}: {results.RUNS}, {results.CURVES}, {results.WEIGHTS}, runs/")
