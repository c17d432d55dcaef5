"""``mixwell reproduce bounds``: measure, check, fit, write and draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mixwell import environment, tables
from mixwell.experiments.bounds.cells import MEASUREMENTS, Cell, measure
from mixwell.experiments.bounds.problems import CURVATURES, KINDS
from mixwell.experiments.bounds.scaling import Best, Fit, growth_of, parting
from mixwell.sweeps import Job, check_workers, run_sweep
from mixwell.tables import Row, column

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
    """All measurements.

    Args:
        seeds: problems of each kind, for the growth of the best horizon; half of them where a run is dear.
        copies: of the noise.
        decades: of budgets.

    Returns:
        The cells, those of the theorem first.
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
    powers = [k / 2 for k in range(math.floor(2 * decades) + 1)]
    scaling = [
        Cell("scaling", kind, seed, noisy, "exact", round(first * 10**power), copies if noisy else 1)
        for kind, noisy, first in SCALING
        for seed in range(-(-seeds // 2) if kind == "logistic" else seeds)
        for power in powers
    ]
    return theorem + scaling


def main(*, seeds: int, copies: int, decades: float, workers: int, out: Path, figures: bool) -> bool:
    """The whole command.

    Args:
        seeds: problems of each kind.
        copies: runs of the noise that are averaged.
        decades: of budgets, over which the best horizon is sought.
        workers: processes.
        out: folder for the files.
        figures: whether to draw.

    Returns:
        Whether the theorems hold wherever they speak.

    Raises:
        ValueError: a number is out of range.
    """
    if seeds < 2 or copies < 2 or not 0.5 <= decades <= 4:
        raise ValueError(
            "bounds needs at least 2 seeds, 2 copies and 0.5 to 4 decades, got "
            f"{seeds}, {copies} and {decades:g}"
        )
    check_workers(workers)
    console = Console()
    rows = _measure(cells_of(seeds=seeds, copies=copies, decades=decades), out, workers, console)
    best, fits = growth_of(rows)
    holds = _print_theorem(rows, console)
    _print_scaling(best, fits, console)
    written = [out / MEASUREMENTS, *_write(best, fits, out)]
    if figures:
        from mixwell.report import bounds

        written += bounds.write(out, out)
    console.print("written: " + ", ".join(str(path) for path in written), highlight=False, soft_wrap=True)
    return holds


def _measure(cells: Sequence[Cell], out: Path, workers: int, console: Console) -> list[Row]:
    """The rows of all cells; those that are in the table already are not measured again."""
    path = out / MEASUREMENTS
    keys = ("purpose", "kind", "seed", "noisy", "curvature", "budget", "copies")
    wanted = {tuple(int(v) if isinstance(v, bool) else v for v in asdict(c).values()): c for c in cells}
    rows = [row for row in tables.read(path) if tuple(row[k] for k in keys) in wanted]
    done = {tuple(row[k] for k in keys) for row in rows}
    todo = [cell for key, cell in wanted.items() if key not in done]
    console.print(f"{len(cells)} measurements, {len(cells) - len(todo)} of them done before", highlight=False)
    if todo:
        environment.write(out)

    def add(job: Job[Cell], found: list[Row]) -> None:
        rows.extend(found)
        tables.write(path, rows)

    run_sweep(
        measure,
        [Job(cell.name, cell.budget, cell) for cell in todo],
        workers=workers,
        checkpoints=out / "unfinished",
        on_done=add,
        console=console,
    )
    order = {key: index for index, key in enumerate(wanted)}
    rows.sort(key=lambda row: (order[tuple(row[k] for k in keys)], row["horizon"]))
    if todo:
        tables.write(path, rows)
    return rows


def _print_theorem(rows: Sequence[Row], console: Console) -> bool:
    """The theorems' inequalities, and F's convexity that they ask for."""
    theorem = [row for row in rows if row["purpose"] == "theorem"]
    for kind, seed in sorted({(str(r["kind"]), int(r["seed"])) for r in theorem}):
        above, chords = KINDS[kind](seed).convexity_violations()
        if above:
            console.print(f"{kind} {seed}: F is not convex on {above} of {chords} chords", highlight=False)
    table = Table(title="measured beside bound, greatest quotient", title_justify="left", title_style="bold")
    for name in ("problem", "gradients", "curvature", "cells", "F(w_avg) - F*", "hypergradient of a round"):
        table.add_column(name)
    holds = True
    groups = dict.fromkeys((r["kind"], r["noisy"], r["curvature"]) for r in theorem)
    for kind, noisy, curvature in groups:
        own = [r for r in theorem if (r["kind"], r["noisy"], r["curvature"]) == (kind, noisy, curvature)]
        gap = max(float(r["gap"]) / float(r["bound"]) for r in own)
        error = max(column(own, "error_ratio"))
        holds = holds and gap <= 1 and not error > 1
        table.add_row(
            str(kind),
            "noisy" if noisy else "full",
            str(curvature),
            str(len(own)),
            f"{gap:.2g}",
            "" if math.isnan(error) else f"{error:.2g}",
        )
    wide = console if console.is_terminal else Console(width=max(110, console.width))
    wide.print(table)
    mark = "  ok  " if holds else "FAILED"
    console.print(
        f"{mark} every quotient must be at most 1. Far below 1 says that the bounds are loose, not that the "
        "algorithm is better than it should be.",
        soft_wrap=True,
    )
    return holds


def _print_scaling(best: Best, fits: Sequence[Fit], console: Console) -> None:
    console.print("the best horizon:")
    for growth in fits:
        told = parting(growth, best[growth.kind, growth.noisy])
        console.print(f"  {told}", highlight=False, soft_wrap=True, markup=False)


def _write(best: Best, fits: Sequence[Fit], out: Path) -> list[Path]:
    rows: list[Row] = [
        {"kind": kind, "noisy": int(noisy), **asdict(found)}
        for (kind, noisy), every in best.items()
        for found in every
    ]
    lines: list[Row] = [{**asdict(growth), "noisy": int(growth.noisy)} for growth in fits]
    return [tables.write(out / HORIZONS, rows), tables.write(out / FITS, lines)]
