"""The page of a comparison of methods (``mixwell compare``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixwell.lab import tables
from mixwell.lab.compare.results import CURVES, FAILURES, RUNS, WEIGHTS
from mixwell.lab.compare.standings import (
    HorizonEffect,
    Standing,
    horizon_effects,
    loss_column,
    standings,
)
from mixwell.lab.compare.summary import format_difference, format_loss, summary, verdict
from mixwell.report import compare_figures, page, style
from mixwell.report.page import DataTable, Page, PageSection, Picture
from mixwell.utils import environment
from mixwell.utils.bidi import isolate

LOSSES = ("method", "rank", "vs. best", "kind", "T", "loss", "steps", "vs. uniform")
COSTS = ("method", "loss", "compute", "seconds", "MiB", "weights")
DOMAINS = 10
"""Number of domains in the table of weights; of more, the largest and the sum of the others."""
NUMBERS = (
    "The mean {label} with the standard deviation over the seeds. Differences are paired by seed, with 95% "
    "intervals, so of twenty methods that are really equal about one looks different. Steps are those that the "
    "last run trained: with 152 of 200, the other 48 paid for validation gradients and trials."
)
SPENT = (
    "Compute is everything that was computed, in training steps; MiB are held in addition to plain training; "
    "weights are the largest averages over the run."
)


def write_report(folder: Path, out: Path) -> list[Path]:
    """Draw the figures of a comparison, write the page, and return the files, the page last.

    Raises:
        ValueError: No run is finished.
    """
    rows, curves, weights, failures = (
        tables.read(folder / name) for name in (RUNS, CURVES, WEIGHTS, FAILURES)
    )
    if not rows:
        raise ValueError(f"{folder / RUNS} has no runs; a report needs at least one that is done")
    found, (_, label) = standings(rows, weights), loss_column(rows)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def draw(figure: Any, name: str, text: str, *, alt: str = "") -> Picture:
        written.extend(style.save(figure, out / name))
        return Picture.from_figure(figure, text, alt=f"{text} {alt}".strip())

    text = (
        f"{label.capitalize()}: a point per seed, a bar at the mean. The best method and those within its noise "
        "have a band behind them; an arrow points to values beyond the axis."
    )
    lowest = ", ".join(f"{isolate(one.name)} {format_loss(one.mean)}" for one in found[:8])
    pictures = [draw(compare_figures.losses(found, label), "losses", text, alt=f"Lowest: {lowest}.")]
    lines = compare_figures.curves(curves, found)
    if lines:
        text = (
            "Validation loss of the last run over compute, mean over the seeds; trials before it are charged."
        )
        alt = f"Lines: {', '.join(map(isolate, lines))}."
        pictures.append(draw(compare_figures.over_training(lines), "curves", text, alt=alt))
    cells = summary(found)
    losses = _table(cells, LOSSES, "Losses")
    sections = [PageSection("Losses", [NUMBERS.format(label=label)], pictures, [losses], columns=2)]
    effects = horizon_effects(found)
    if effects:
        text = f"Mean {label} with the shortest and with the longest horizon."
        picture = draw(compare_figures.horizons(effects, label), "horizons", text)
        sections.append(
            PageSection(
                "Short and long horizons", (), [picture], [_horizons_table(effects, label)], columns=2
            )
        )
    if any(one.weights for one in found):
        sections.append(PageSection("Weights", tables=[_weights_table(found)], columns=1))
    pictures = [
        draw(
            compare_figures.cost(found, name, label),
            f"cost-{name}",
            f"Mean {label} against {compare_figures.COSTS[name][1]}.",
        )
        for name in compare_figures.costs(found)
    ]
    costs = _table(cells, COSTS, "Costs and weights")
    sections.append(PageSection("Costs", [SPENT], pictures, [costs], columns=2))
    lead = [verdict(rows)]
    if failures:
        lead.append("Not all methods could be run; the reasons are at the end of the page.")
        reasons = [[str(row[name]) for name in ("variant", "seed", "reason")] for row in failures]
        failed = DataTable(["method", "seed", "reason"], reasons)
        sections.append(PageSection("Failures", tables=[failed], columns=1))
    title = f"Comparison of {len(found)} method{'s'[: len(found) - 1]}"
    whole = Page(title, lead, sections, environment.facts([folder]))
    return [*written, page.write_page(whole, out / "report.html")]


def _table(cells: Sequence[dict[str, str]], columns: Sequence[str], text: str) -> DataTable:
    rows = [[row[name] for name in columns] for row in cells]
    return DataTable(columns, rows, text)


def _horizons_table(effects: Sequence[HorizonEffect], label: str) -> DataTable:
    rows = [
        [
            one.entry,
            f"{format_loss(one.runs[0].mean)} → {format_loss(one.runs[-1].mean)}",
            format_difference(one.change),
        ]
        for one in effects
    ]
    return DataTable(["method", label, "change"], rows, "Change from the shortest to the longest horizon")


def _weights_table(found: Sequence[Standing]) -> DataTable:
    """Return the average weights in percent, shaded; of many domains those that are large in any entry."""
    known = [one for one in found if one.weights]
    largest: dict[str, float] = {}
    for one in known:
        for name, weight in one.weights.items():
            largest[name] = max(largest.get(name, 0.0), weight)
    shown = list(largest)
    if len(shown) > DOMAINS:
        kept = sorted(largest, key=largest.__getitem__, reverse=True)[:DOMAINS]
        shown = [name for name in largest if name in kept]
    others = [name for name in largest if name not in shown]
    columns = ["method", *shown, *([f"{len(others)} others"] if others else [])]
    values = [
        [
            *(one.weights.get(name, math.nan) for name in shown),
            *([sum(one.weights.get(name, 0.0) for name in others)] if others else []),
        ]
        for one in known
    ]
    rows = [
        [one.name, *("" if math.isnan(value) else f"{100 * value:.1f}" for value in row)]
        for one, row in zip(known, values, strict=True)
    ]
    shades = [[0.0 if math.isnan(value) else value for value in row] for row in values]
    text = "Average weight of each domain over the run in percent, mean over the seeds"
    return DataTable(columns, rows, text, shades)
