"""``mixwell compare``: methods side by side at equal compute; ``mixwell methods``: what there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixwell.lab import problems, tables
from mixwell.lab.compare import budgets, results
from mixwell.lab.compare.contestants import Contestant, choose, horizons_of
from mixwell.lab.compare.results import Entry
from mixwell.lab.tables import Row
from mixwell.training import concurrent, config_io, metrics, mixing
from mixwell.training.concurrent import Planned
from mixwell.training.config import Config
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.run import Run, finished
from mixwell.training.sweeps import check_workers
from mixwell.utils import environment
from mixwell.utils.locks import only_one
from mixwell.utils.terminal import say, show

TOLD = (
    ("arm", "rank", "T", "loss", "against uniform"),
    ("arm", "compute", "steps", "seconds", "MiB", "weights"),
)
"""The columns of two tables, one under the other, since terminals are narrow; the report page has all."""


def main(
    problem: str,
    *,
    names: Sequence[str],
    seeds: int,
    horizons: str,
    equal: str,
    out: Path | None,
    workers: int | None,
    overrides: Sequence[str],
    figures: bool,
    engine: Engine = LOCAL,
) -> None:
    """Run what is not done yet, write the tables, print and draw.

    Args:
        problem: the path of a config, or the name of an embedded problem.
        names: of methods, or of entries of ``compare`` in the config; ``all``.
        seeds: how many, from 0.
        horizons: of the methods that learn online, with commas.
        equal: ``compute``, or ``steps`` of the last run.
        out: the folder; ``None`` for ``runs/compare-`` and the problem's name.
        workers: how many runs at a time; ``None`` for one per core.
        overrides: ``key=value``.
        figures: whether to write the report page.
        engine: where they are done.

    Raises:
        ValueError: a setting is wrong, or a method lacks what it needs.
        ChildProcessError: runs failed; the others are told.
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
    base = config_io.read(problems.find(problem, out, console), overrides)
    if base.validation is None and base.test is None:
        raise ValueError("a comparison needs something to compare by: give `validation` or `test`")
    chosen, refused = choose(base, names, horizons_of(horizons))
    if equal == "compute":
        chosen, too_dear = _affordable(base, chosen, console)
        refused |= too_dear
    for name, reason in refused.items():
        say(console, f"left out: {name} ({reason})")
    entries = _entries(base, chosen, seeds=seeds, equal=equal, out=out)
    with only_one(out):
        environment.write(out)
        planned = [Planned(one.config, one.folder, work=_work(one)) for one in entries]
        failed: ChildProcessError | InterruptedError | None = None
        try:
            concurrent.run_all(
                planned, workers=workers, unfinished=out / "unfinished", console=console, engine=engine
            )
        except (ChildProcessError, InterruptedError) as error:  # what is done is told all the same
            failed = error
        done = [one for one in entries if finished(one.folder)]
        rows = results.write(out, _by_arm(done), _failures(out, entries, refused))
    if rows:
        _tell(console, rows, out)
    if figures and rows:
        from mixwell.report import compare as report

        written = report.write(out, out)
        say(console, f"look at {next(path for path in written if path.suffix == '.html')}")
    if failed is not None:
        raise failed


def _affordable(
    base: Config, chosen: Sequence[Contestant], console: Console
) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can train within the budget, for as many steps as it pays for; and why others cannot."""
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


def _entries(base: Config, chosen: Sequence[Contestant], *, seeds: int, equal: str, out: Path) -> list[Entry]:
    """Seed by seed, so that a comparison that was stopped has something to compare."""
    places = [_slug(one.name) for one in chosen]
    for one, place in zip(chosen, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"{one.name!r} and another arm would share runs/{place}-0; rename it in `compare`"
            )
    return [
        Entry(
            one.name,
            one.entry,
            one.method.name,
            "online" if one.learns else one.method.kind,
            mixing.horizon(one.config) if one.method.has_rounds else None,
            seed,
            config_io.check({**one.config.model_dump(mode="json"), "seed": seed}, where=one.name),
            out / "runs" / f"{_slug(one.name)}-{seed}",
            float(base.steps) if equal == "compute" else None,
        )
        for seed in range(seeds)
        for one in chosen
    ]


def _by_arm(entries: Sequence[Entry]) -> list[Entry]:
    arms = list(dict.fromkeys(one.arm for one in entries))
    return sorted(entries, key=lambda one: (arms.index(one.arm), one.seed))


def _work(entry: Entry) -> int:
    """For the progress bar: everything, in steps."""
    return max(entry.config.steps, int(entry.budget or 0))


def _failures(out: Path, entries: Sequence[Entry], refused: dict[str, str]) -> list[Row]:
    found: list[Row] = [{"arm": name, "seed": "", "reason": reason} for name, reason in refused.items()]
    for one in entries:
        report = out / "unfinished" / f"{one.folder.name}.failed.txt"
        if not finished(one.folder) and report.exists():
            last = report.read_text(encoding="utf-8").strip().splitlines()[-1]
            found.append({"arm": one.arm, "seed": one.seed, "reason": last})
    return found


def _tell(console: Console, rows: Sequence[Row], out: Path) -> None:
    from mixwell.report import compare as report

    texts = report.summary(rows, tables.read(out / results.WEIGHTS))
    for columns in TOLD:
        table = Table(*columns, box=None)
        for column in table.columns:
            column.no_wrap = True
        for cells in report.columns_of(texts, columns):
            table.add_row(*(escape(cell) for cell in cells))
        show(console, table)
        say(console, "")
    for line in report.findings(rows):
        say(console, line)
    say(console, f"{out}: {results.RUNS}, {results.CURVES}, {results.WEIGHTS}, runs/")


def _slug(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", name)
