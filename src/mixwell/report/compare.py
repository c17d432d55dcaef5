"""The page of a comparison of methods (``mixwell compare``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixwell.lab import tables
from mixwell.lab.tables import Row
from mixwell.report import compare_figures, compare_rows, page, style
from mixwell.report.compare_words import HEADINGS, difference, findings, some, summary, written
from mixwell.report.page import Page, Picture, Section, Sheet
from mixwell.report.standings import Pair, Standing, loss_column, pairs, standings
from mixwell.utils import environment

__all__ = [
    "CURVES",
    "FAILURES",
    "HEADINGS",
    "RUNS",
    "WEIGHTS",
    "columns_of",
    "findings",
    "summary",
    "write",
]

RUNS, CURVES, WEIGHTS, FAILURES = "compare.csv", "curves.csv", "weights.csv", "failures.csv"
WIDE = 7.5
"""Inches of the files, which have room for longer names than a page that must fit a phone."""
TOLD = 8
LOSSES = ("arm", "rank", "beside the best", "kind", "T", "loss", "against uniform")
COSTS = ("arm", "loss", "compute", "steps", "seconds", "MiB", "weights")
"""The columns of the two tables of a page, neither of which is too wide for it."""
MANY, TOP = 20, 12
"""A table with more rows is folded up, and its first rows are shown."""
NUMBERS = (
    "The mean {label} with the standard deviation over the seeds. Differences to the best and to uniform weights "
    "are paired by seed; their intervals are of 95%, so that of twenty arms that are really the same about one "
    "looks different."
)
SPENT = (
    "Compute is all that was computed, in training steps; steps are those of the last run; MiB are held from step "
    "to step beside plain training (what a solver takes for a while at the end of a round is not in it); the "
    "weights are the greatest averages over the run. Named in the pictures, where there is room: the best of each "
    "kind, and uniform and proportional weights."
)


def write(folder: Path, out: Path) -> list[Path]:
    """Draw the figures and write the page of a comparison.

    Args:
        folder: with the tables of the comparison.
        out: where to.

    Returns:
        The files.

    Raises:
        ValueError: no run is done.
    """
    rows, curves, weights, failures = (
        tables.read(folder / name) for name in (RUNS, CURVES, WEIGHTS, FAILURES)
    )
    if not rows:
        raise ValueError(f"{folder / RUNS} has no runs; a report needs at least one that is done")
    found, (_, label) = standings(rows, weights), loss_column(rows)
    out.mkdir(parents=True, exist_ok=True)
    figures: list[Path] = []

    def keep(figure: Any, name: str) -> None:
        figures.extend(style.save(figure, out / name))

    keep(compare_rows.losses(found, label, width=WIDE), "losses")
    sections = [_losses_section(found, label)]
    shades = compare_rows.weights(found, width=WIDE)
    if shades is not None:
        keep(shades, "weights")
    texts = summary(rows, weights)
    numbers = _sheet(texts, LOSSES, "DomainLosses")
    sections.append(Section("The numbers", [NUMBERS.format(label=label)], sheets=[numbers]))
    made = pairs(found)
    if made:
        keep(compare_rows.horizons(made, label, width=WIDE), "horizons")
        sections.append(_horizons_section(made, label))
    names = compare_figures.costs(found)
    keep(compare_figures.cost(found, names, label), "cost")
    sections.append(_cost_section(found, names, label, _sheet(texts, COSTS, "Costs and weights")))
    lines = compare_figures.courses(curves, compare_figures.shown_curves(found))
    if lines:
        figure = compare_figures.over_training(lines)
        keep(figure, "curves")
        sections.append(_curves_section(figure, list(lines)))
    if failures:
        sections.append(_failures_section(failures))
    whole = Page(_title(found), _lead(rows, failures), sections, environment.facts([folder]))
    return [*figures, page.write(whole, out / "report.html")]


def _title(found: Sequence[Standing]) -> str:
    return (
        f"{len(found)} ways to choose the mixture"
        if len(found) > 1
        else f"One way to choose the mixture: {found[0].arm}"
    )


def _lead(rows: Sequence[Row], failures: Sequence[Row]) -> list[str]:
    arms = dict.fromkeys(str(row["arm"]) for row in failures)
    said = findings(rows)
    if arms:
        said.append(f"Not all could be run: {some(list(arms))}; the reasons are at the end.")
    return said


def columns_of(texts: Sequence[Sequence[str]], columns: Sequence[str]) -> list[list[str]]:
    """Some columns of the table of texts.

    Args:
        texts: of :func:`summary`.
        columns: such as :data:`LOSSES`.

    Returns:
        The rows with these alone.
    """
    places = [HEADINGS.index(name) for name in columns]
    return [[row[place] for place in places] for row in texts]


def _sheet(texts: Sequence[Sequence[str]], columns: Sequence[str], text: str) -> Sheet:
    rows = columns_of(texts, columns)
    return Sheet(columns, rows, text, top=TOP if len(rows) > MANY else 0)


def _losses_section(found: Sequence[Standing], label: str) -> Section:
    text = (
        f"{label.capitalize()} at the end: a point for each seed, a bar for the mean. The best, and those within "
        "its noise, have a band behind them. An arrow points to what is too far off for the picture."
    )
    first = ", ".join(f"{one.arm} {written(one.mean)}" for one in found[:TOLD])
    losses = compare_rows.losses(found, label)
    pictures = [Picture.of(losses, text, alt=f"{text} The least: {first}.")]
    shades = compare_rows.weights(found)
    if shades is not None:
        words = "Average weight of each domain over the run in percent, mean over the seeds; the same order."
        named, _ = compare_rows.shown_domains(found)
        best = {name: found[0].weights.get(name, math.nan) for name in named}
        told = ", ".join(f"{name} {weight:.0%}" for name, weight in best.items() if math.isfinite(weight))
        pictures.append(Picture.of(shades, words, alt=f"{words} {found[0].arm}: {told}."))
    return Section("Losses and weights", (), pictures, columns=2)


def _horizons_section(made: Sequence[Pair], label: str) -> Section:
    text = (
        f"Mean {label} of methods that were run with several horizons; the change is from the shortest to "
        "the longest, and those that gain most by it are above."
    )
    if any(len(pair.arms) > 2 for pair in made):
        text += " Small points are other horizons."
    told = "; ".join(
        f"{pair.entry} from T = {pair.arms[0].horizon} to {pair.arms[-1].horizon}: {difference(pair.change)}"
        for pair in made
    )
    picture = Picture.of(compare_rows.horizons(made, label), text, alt=f"{text} {told}.")
    rows = [
        [
            pair.entry,
            f"{written(pair.arms[0].mean)} → {written(pair.arms[-1].mean)}",
            difference(pair.change),
        ]
        for pair in made
    ]
    sheet = Sheet(["method", label, "change"], rows)
    return Section("Short and long horizons", (), [picture], [sheet], columns=2)


def _cost_section(found: Sequence[Standing], names: Sequence[str], label: str, sheet: Sheet) -> Section:
    pictures: list[Picture] = []
    for name in names:
        what = compare_figures.COSTS[name][1]
        text = f"Mean {label} against {what}."
        if name == "compute":
            text += " The dotted line is what was allowed."
        values = ", ".join(
            f"{one.arm} {written(one.mean)} at {compare_figures.COSTS[name][0](one):,.0f}"
            for one in found[:TOLD]
        )
        pictures.append(Picture.of(compare_figures.cost(found, [name], label), text, alt=f"{text} {values}."))
    return Section("What it costs", (SPENT,), pictures, [sheet], columns=2)


def _curves_section(figure: Any, arms: Sequence[str]) -> Section:
    text = (
        "Validation loss of the last run over all that was computed until then, mean over the seeds: the best "
        "arms, and uniform and proportional weights. What is trained before comes first, so such lines begin late."
    )
    return Section(
        "Over training", (), [Picture.of(figure, text, alt=f"{text} Lines: {', '.join(arms)}.")], columns=2
    )


def _failures_section(failures: Sequence[Row]) -> Section:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in failures:
        by_reason.setdefault((str(row["arm"]), str(row["reason"])), []).append(str(row["seed"]))
    said = [
        f"{arm}: {reason}"
        if seeds == [""]
        else f"{arm}, seed{'s'[: len(seeds) - 1]} {', '.join(seeds)}: {reason}"
        for (arm, reason), seeds in by_reason.items()
    ]
    return Section("What could not be run", said)
