"""The pictures and the page of several ways to train, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mixwell import environment, tables
from mixwell.experiments.arms import CURVES, RUNS, WEIGHTS
from mixwell.intervals import interval
from mixwell.report import page, style
from mixwell.report.page import Page, Picture, Section, Sheet
from mixwell.tables import Row

LOSSES = (("test_loss", "test loss"), ("validation_loss", "validation loss"))


def write(folder: Path, out: Path) -> list[Path]:
    """Draw the figures and write the page of a comparison.

    Args:
        folder: written by :func:`mixwell.experiments.arms.run`.
        out: where to.

    Returns:
        The files.
    """
    runs, curves, weights = (tables.read(folder / name) for name in (RUNS, CURVES, WEIGHTS))
    arms = list(dict.fromkeys(str(row["arm"]) for row in runs))
    out.mkdir(parents=True, exist_ok=True)
    comparison = _comparison(runs, curves, arms)
    moving = _moving(weights, arms)
    written = style.save(comparison, out / "comparison")
    sections = [
        Section(
            "Losses",
            (),
            [Picture.of(comparison, "Final loss of every run, and the validation loss over training.")],
            [_losses_sheet(runs, arms)],
            wide=True,
        )
    ]
    if moving:
        figure = _weights_figure(weights, moving)
        written += style.save(figure, out / "weights")
        sections.append(
            Section(
                "Weights",
                ("Means over the seeds; the shade is from the least to the greatest.",),
                [Picture.of(figure, "Weight of each domain over training, where it was learned.")],
                wide=True,
            )
        )
    made = Page(f"{len(arms)} ways to train", findings(runs), sections, environment.facts([folder]))
    return [*written, page.write(made, out / "report.html")]


def findings(runs: Sequence[Row]) -> list[str]:
    """How the first arm compares with each of the others, seed by seed.

    Args:
        runs: rows of the table of runs.

    Returns:
        A sentence for each.
    """
    arms = list(dict.fromkeys(str(row["arm"]) for row in runs))
    column, label = loss_column(runs)
    first = {row["seed"]: float(row[column]) for row in runs if row["arm"] == arms[0]}
    lines: list[str] = []
    for other in arms[1:]:
        theirs = {row["seed"]: float(row[column]) for row in runs if row["arm"] == other}
        differences = [first[seed] - theirs[seed] for seed in first if seed in theirs]
        better = sum(one < 0 for one in differences)
        found = interval(differences)
        spread = "" if len(differences) < 2 else f" [{found.low:+.4f}, {found.high:+.4f}] (95%)"
        lines.append(
            f"{arms[0]} against {other}: {label} {found.mean:+.4f}{spread}, lower in {better} of "
            f"{len(differences)} seed{'s' if len(differences) > 1 else ''}."
        )
    return lines


def loss_column(runs: Sequence[Row]) -> tuple[str, str]:
    """The loss that arms are compared by: that of the test set where there is one.

    Args:
        runs: rows of the table of runs.

    Returns:
        The column, and how it is called.
    """
    return next((column, label) for column, label in LOSSES if column in runs[0])


def _comparison(runs: Sequence[Row], curves: Sequence[Row], arms: Sequence[str]) -> Any:
    figure, axes = style.new_figure(1, 2, width=11.0, height=3.8)
    column, label = loss_column(runs)
    left, right = axes[0]
    beyond = _far_off(runs, arms, column)
    for place, (arm, colour) in enumerate(zip(arms, style.colours(len(arms)), strict=True)):
        values = [float(row[column]) for row in runs if row["arm"] == arm]
        if arm == beyond:
            told = f"{np.mean(values):.2f}\n(not to scale)"
            left.text(
                place,
                0.97,
                told,
                color=colour,
                fontsize=8,
                ha="center",
                va="top",
                transform=left.get_xaxis_transform(),
            )
        else:
            left.plot([place] * len(values), values, "o", color=colour, alpha=0.5, ms=5)
            left.plot([place - 0.25, place + 0.25], [np.mean(values)] * 2, color=colour, lw=2.5)
        at = _by_step([row for row in curves if row["arm"] == arm], "validation_loss")
        right.plot(list(at), [np.mean(v) for v in at.values()], color=colour, lw=1.6, label=style.plain(arm))
    left.set_xticks(range(len(arms)), [fill(style.plain(arm), 60 // len(arms)) for arm in arms], fontsize=9)
    left.set_xlim(-0.6, len(arms) - 0.4)
    left.set_ylabel(label, fontsize=9)
    right.set_xlabel("training step", fontsize=9)
    right.set_ylabel("validation loss (mean over seeds)", fontsize=9)
    right.legend(fontsize=8, frameon=False)
    # What happens in the first steps, and an arm that is far off, would hide the rest.
    first = 0.08 * max(float(row["step"]) for row in curves)
    shown = [
        float(row["validation_loss"]) for row in curves if float(row["step"]) > first and row["arm"] != beyond
    ]
    if shown:
        room = 0.05 * (max(shown) - min(shown) + 1e-9)
        right.set_ylim(min(shown) - room, max(shown) + room)
    return figure


def _far_off(runs: Sequence[Row], arms: Sequence[str], column: str) -> str | None:
    """An arm beside whose loss the differences between the others could not be seen."""
    means = {arm: np.mean([float(row[column]) for row in runs if row["arm"] == arm]) for arm in arms}
    if len(arms) < 3:
        return None
    least, *_, next_to_last, last = sorted(means, key=means.__getitem__)
    far = means[last] - means[least] > 5 * (means[next_to_last] - means[least])
    return last if far else None


def _by_step(rows: Sequence[Row], column: str) -> dict[int, list[float]]:
    """The values of a column at each step, the steps in order."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), []).append(float(row[column]))
    return dict(sorted(found.items()))


def _by_domain(weights: Sequence[Row], arm: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in weights:
        if row["arm"] == arm:
            found.setdefault(str(row["domain"]), []).append(row)
    return found


def _moving(weights: Sequence[Row], arms: Sequence[str]) -> list[str]:
    """The arms whose weights are not fixed."""
    return [
        arm
        for arm in arms
        if any(len({row["weight"] for row in rows}) > 1 for rows in _by_domain(weights, arm).values())
    ]


def _weights_figure(weights: Sequence[Row], arms: Sequence[str]) -> Any:
    figure, axes = style.new_figure(
        1, len(arms), width=7.0 if len(arms) == 1 else 4.6 * len(arms), height=3.8
    )
    for axis, arm in zip(axes[0], arms, strict=True):
        domains = _by_domain(weights, arm)
        for (domain, rows), colour in zip(domains.items(), style.colours(len(domains)), strict=True):
            at = _by_step(rows, "weight")
            steps, means = list(at), [np.mean(v) for v in at.values()]
            axis.plot(steps, means, color=colour, lw=1.6, drawstyle="steps-post", label=style.plain(domain))
            low, high = [min(v) for v in at.values()], [max(v) for v in at.values()]
            axis.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0, step="post")
        axis.set_ylim(0, 1)
        axis.set_xlabel("training step", fontsize=9)
        axis.set_ylabel("weight", fontsize=9)
        axis.legend(fontsize=8, frameon=False)
        if len(arms) > 1:
            axis.set_title(style.plain(arm), fontsize=10, color=style.INK)
    return figure


def _losses_sheet(runs: Sequence[Row], arms: Sequence[str]) -> Sheet:
    present = [(column, label) for column, label in LOSSES if column in runs[0]]
    rows: list[list[str]] = []
    for arm in arms:
        own = [row for row in runs if row["arm"] == arm]
        cells = [
            f"{np.mean(tables.column(own, c)):.4f} ± {np.std(tables.column(own, c)):.4f}" for c, _ in present
        ]
        seconds = f"{np.mean(tables.column(own, 'seconds')):.0f}"
        rows.append([arm, str(len(own)), *cells, str(own[0]["steps"]), seconds])
    return Sheet(
        ["arm", "seeds", *(label for _, label in present), "steps", "seconds"],
        rows,
        "Mean and standard deviation over the seeds.",
    )
