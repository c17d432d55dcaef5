"""``mixwell reproduce bounds``: measure, check the theorems, and fit the growth of the best horizon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console

from mixwell.lab import tables
from mixwell.lab.bounds.cells import MEASUREMENTS, Cell, measure
from mixwell.lab.bounds.problems import CURVATURES
from mixwell.lab.bounds.scaling import Best, Fit, growth_of, growth_table
from mixwell.lab.bounds.theorem import BoundCheck, compare_with_bounds, verdict
from mixwell.lab.tables import Row, Value
from mixwell.training.engines import LOCAL, Engine, Job
from mixwell.training.sweeps import check_workers, run_sweep
from mixwell.utils import environment, terminal
from mixwell.utils.files import lock_folder

HORIZONS, FITS = "horizons.csv", "fits.csv"
SCALING = (
    ("quadratic", False, 100),
    ("steep quadratic", False, 100),
    ("logistic", False, 30),
    ("noisy quadratic", True, 100),
    ("logistic", True, 30),
)
"""Kind, noise, and the first budget of three decades."""


def cells_of(*, seeds: int, copies: int, decades: float) -> list[Cell]:
    """Return all measurements, those of the theorem first.

    Args:
        seeds: problems of each kind, for the growth of the best horizon; half of them where a run is expensive.
        decades: decades of budgets; from three on, the theorem is also compared at N = 10^8.
    """
    theorem = [
        Cell("theorem", kind, seed, False, curvature, budget)
        for kind in ("quadratic", "logistic")
        for seed in range(min(seeds, 3))
        for curvature in CURVATURES
        for budget in (1_000, 10_000)
    ]
    theorem += [
        Cell("theorem", kind, seed, True, "exact", budget, copies)
        for kind in ("quadratic", "noisy quadratic", "logistic")
        for seed in range(min(seeds, 3))
        for budget in (1_000, 10_000)
    ]
    if decades >= 3:
        # A minute each, but only there the budget is large enough for the bound to be informative.
        theorem += [
            Cell("theorem", "quadratic", s, False, "exact", 100_000_000) for s in range(min(seeds, 3))
        ]
    powers = [k / 2 for k in range(math.floor(2 * decades) + 1)]
    scaling = [
        Cell("scaling", kind, seed, noisy, "exact", round(first * 10**power), copies if noisy else 1)
        for kind, noisy, first in SCALING
        for seed in range(max(2, seeds // 2) if kind == "logistic" else seeds)
        for power in powers
    ]
    return theorem + scaling


def main(
    *,
    seeds: int,
    copies: int,
    decades: float,
    workers: int | None,
    out: Path,
    engine: Engine = LOCAL,
) -> bool:
    """Run the command and return whether the theorems hold wherever they apply.

    Args:
        seeds: problems of each kind.
        copies: runs of the noise that are averaged.
        decades: of budgets, for the growth of the best horizon.
        workers: number of concurrent measurements; ``None`` for one per core.

    Raises:
        ValueError: A number is out of range.
    """
    if seeds < 2 or copies < 2 or not 0.5 <= decades <= 4:
        raise ValueError(
            "bounds needs at least 2 seeds, 2 copies and 0.5 to 4 decades, got "
            f"{seeds}, {copies} and {decades:g}"
        )
    check_workers(workers, engine)
    console = Console()
    cells = cells_of(seeds=seeds, copies=copies, decades=decades)
    rows = _measure(cells, out, workers, engine, console)
    best, fits = growth_of(rows)
    checks = compare_with_bounds(rows)
    _print(checks, best, fits, console)
    _write_fits(best, fits, out)
    terminal.say(console, f"{out}: {MEASUREMENTS}, {HORIZONS}, {FITS}")
    return all(found.holds for found in checks)


def _measure(
    cells: Sequence[Cell], out: Path, workers: int | None, engine: Engine, console: Console
) -> list[Row]:
    """Return the rows of all cells, measuring those that are not in the table yet; other rows stay in it."""
    path = out / MEASUREMENTS
    wanted = {tuple(int(v) if isinstance(v, bool) else v for v in asdict(c).values()): c for c in cells}
    with lock_folder(out):
        rows = tables.read(path)
        done = {_key(row) for row in rows}
        todo = [cell for key, cell in wanted.items() if key not in done]
        terminal.say(console, f"{len(cells)} measurements, {len(cells) - len(todo)} of them done before")
        if todo:
            environment.write(out)

        def add(job: Job[Cell], found: list[Row]) -> None:
            rows.extend(found)
            rows.sort(
                key=lambda row: (
                    str(row["purpose"]),
                    *map(str, _key(row)[1:5]),
                    *_key(row)[5:],
                    row["horizon"],
                )
            )
            tables.write(path, rows)

        run_sweep(
            measure,
            [Job(cell.name, cell.work, cell) for cell in todo],
            workers=workers,
            folder=out / "unfinished",
            on_done=add,
            console=console,
            engine=engine,
        )
    return [row for row in rows if _key(row) in wanted]


def _key(row: Row) -> tuple[Value, ...]:
    return tuple(row[f.name] for f in fields(Cell))


def _print(checks: Sequence[BoundCheck], best: Best, fits: Sequence[Fit], console: Console) -> None:
    columns = ["problem", "gradients", "curvature", "rows", "F(w_avg) - F*", "a round's error", "informative"]
    rows = [
        [
            found.kind,
            "noisy" if found.noisy else "full",
            found.curvature,
            str(found.rows),
            f"{found.gap:.2g}",
            "" if found.noisy else f"{found.error:.2g}",
            f"{found.informative} of {found.rows}",
        ]
        for found in checks
    ]
    tables.show(console, columns, rows, title="largest ratio of measurement to bound")
    for line in verdict(checks):
        terminal.say(console, line)
    terminal.say(console, "the best horizon:")
    columns, rows = growth_table(best, fits)
    for kind, gradients, *cells in rows:  # a line each: nine columns are too wide for a terminal
        found = "; ".join(f"{name} {cell}" for name, cell in zip(columns[2:], cells, strict=True))
        terminal.say(console, f"  {kind}, {gradients} gradients: {found}")


def _write_fits(best: Best, fits: Sequence[Fit], out: Path) -> None:
    horizons: list[Row] = [
        {"kind": kind, "noisy": int(noisy), **asdict(found)}
        for (kind, noisy), every in best.items()
        for found in every
    ]
    tables.write(out / HORIZONS, horizons)
    lines: list[Row] = [
        {
            "kind": growth.kind,
            "noisy": int(growth.noisy),
            "problems": growth.slope.count,
            "slope": growth.slope.mean,
            "slope_low": growth.slope.low,
            "slope_high": growth.slope.high,
            "late": growth.late.mean,
            "late_low": growth.late.low,
            "late_high": growth.late.high,
            "theory": growth.theory,
            "intercept": growth.intercept,
        }
        for growth in fits
    ]
    tables.write(out / FITS, lines)
