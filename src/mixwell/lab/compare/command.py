"""``mixwell compare``: train several methods with the same seeds, data and compute, and compare their losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixwell.lab import problems, tables
from mixwell.lab.compare import budgets, results
from mixwell.lab.compare.contestants import Contestant, choose, parse_horizons
from mixwell.lab.compare.results import ComparedRun
from mixwell.lab.compare.standings import standings
from mixwell.lab.compare.summary import summary, verdict
from mixwell.lab.tables import Row
from mixwell.training import builder, concurrent, config_io, metrics
from mixwell.training.concurrent import Planned
from mixwell.training.config import Config
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.run import Run, finished
from mixwell.training.sweeps import check_workers
from mixwell.utils import environment
from mixwell.utils.files import lock_folder
from mixwell.utils.terminal import say, show

TERMINAL_COLUMNS = (
    ("method", "rank", "T", "loss", "vs. uniform"),
    ("method", "compute", "steps", "seconds", "MiB", "weights"),
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
    planned = _runs(base, chosen, seeds=seeds, equal=equal, out=out)
    comparison = _execute(planned, refused, out=out, workers=workers, console=console, engine=engine)
    if comparison.rows:
        _print(comparison, console)
    return comparison


def _execute(
    runs: Sequence[ComparedRun],
    refused: dict[str, str],
    *,
    out: Path,
    workers: int | None,
    console: Console,
    engine: Engine,
) -> Comparison:
    with lock_folder(out):
        environment.write(out)
        # The progress bar counts everything that is computed, in training steps.
        planned = [
            Planned(one.config, one.folder, work=max(one.config.steps, int(one.budget or 0))) for one in runs
        ]
        failed: Exception | None = None
        try:
            concurrent.run_all(
                planned, workers=workers, unfinished=out / "unfinished", console=console, engine=engine
            )
        except (ChildProcessError, InterruptedError) as error:  # the finished runs are reported nevertheless
            failed = error
        order = list(dict.fromkeys(one.name for one in runs))
        done = sorted(
            (one for one in runs if finished(one.folder)), key=lambda one: (order.index(one.name), one.seed)
        )
        return Comparison(out, results.write_tables(out, done, _failures(out, runs, refused)), failed)


def _affordable(
    base: Config, chosen: Sequence[Contestant], console: Console
) -> tuple[list[Contestant], dict[str, str]]:
    """Give each contestant the steps that the budget pays for; also return why some cannot train at all."""
    _, rows = Run(base, Path(), console=console).load()
    sizes = {name: len(own) for name, own in rows.domains.items()}
    held_out = 0 if rows.validation is None else len(rows.validation)
    found: list[Contestant] = []
    refused: dict[str, str] = {}
    for one in chosen:
        try:
            config = budgets.affordable(one.config, sizes, held_out, budget=base.steps)
            found.append(replace(one, config=config))
        except ValueError as error:
            if one.named:
                raise
            refused[one.name] = str(error)
    return found, refused


def _runs(
    base: Config, chosen: Sequence[Contestant], *, seeds: int, equal: str, out: Path
) -> list[ComparedRun]:
    """Return the runs seed by seed, so that an interrupted comparison has something to compare."""
    places = [_slug(one.name) for one in chosen]
    for one, place in zip(chosen, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"{one.name!r} and another entry would share runs/{place}-0; rename it in `compare`"
            )
    return [
        ComparedRun(
            one.name,
            one.entry,
            one.method.name,
            "online" if one.learns else one.method.kind,
            builder.horizon(one.config) if one.method.has_rounds else None,
            seed,
            config_io.validate_config({**one.config.model_dump(mode="json"), "seed": seed}, where=one.name),
            out / "runs" / f"{_slug(one.name)}-{seed}",
            float(base.steps) if equal == "compute" else None,
        )
        for seed in range(seeds)
        for one in chosen
    ]


def _failures(out: Path, runs: Sequence[ComparedRun], refused: dict[str, str]) -> list[Row]:
    found: list[Row] = [{"arm": name, "seed": "", "reason": reason} for name, reason in refused.items()]
    for one in runs:
        report = out / "unfinished" / f"{one.folder.name}.failed.txt"
        if not finished(one.folder) and report.exists():
            last = report.read_text(encoding="utf-8").strip().splitlines()[-1]
            found.append({"arm": one.name, "seed": one.seed, "reason": last})
    return found


def _print(comparison: Comparison, console: Console) -> None:
    out = comparison.folder
    cells = summary(standings(comparison.rows, tables.read(out / results.WEIGHTS)))
    for columns in TERMINAL_COLUMNS:
        table = Table(*columns, box=None)
        for column in table.columns:
            column.no_wrap = True
        for row in cells:
            table.add_row(*(escape(row[name]) for name in columns))
        show(console, table)
        say(console, "")
    say(console, verdict(comparison.rows))
    say(console, f"{out}: {results.RUNS}, {results.CURVES}, {results.WEIGHTS}, runs/")


def _slug(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", name)
