"""The pictures and the page of several ways to train, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mixwell.lab import tables
from mixwell.lab.arms import CURVES, RUNS, WEIGHTS
from mixwell.lab.intervals import interval
from mixwell.lab.tables import Row
from mixwell.report import lines, page, style
from mixwell.report.lines import Course, Looks
from mixwell.report.page import Page, Picture, Section, Sheet
from mixwell.utils import environment

FINALS, CURVE = "finals", "curve"
LOSSES = (("test_loss", "test loss"), ("validation_loss", "validation loss"))


def write(folder: Path, out: Path) -> list[Path]:
    """Draw the figures and write the page of a comparison.

    Args:
        folder: written by :func:`mixwell.lab.arms.run`.
        out: where to.

    Returns:
        The files.
    """
    runs, curves, weights = (tables.read(folder / name) for name in (RUNS, CURVES, WEIGHTS))
    arms = list(dict.fromkeys(str(row["arm"]) for row in runs))
    out.mkdir(parents=True, exist_ok=True)
    looks = dict(zip(arms, style.looks(len(arms)), strict=True))
    written = style.save(_comparison(runs, curves, looks, (FINALS, CURVE)), out / "comparison")
    pictures = [
        Picture.of(
            _comparison(runs, curves, looks, (FINALS,)),
            "Loss at the end of every run, and the mean of each arm.",
            alt=" ".join(["Loss at the end of every run.", *findings(runs)]),
        ),
        Picture.of(
            _comparison(runs, curves, looks, (CURVE,)), "Validation loss over training, mean over the seeds."
        ),
    ]
    sections = [Section("DomainLosses", (), pictures, [_losses_sheet(runs, arms)], columns=2)]
    moving = _moving(weights, arms)
    if moving:
        written += style.save(_weights_figure(weights, moving), out / "weights")
        learned = [
            Picture.of(_weights_figure(weights, [arm]), f"{arm}: weight of each domain over training.")
            for arm in moving
        ]
        words = "Means over the seeds; the shade is from the least to the greatest."
        sections.append(Section("Weights", (words,), learned, columns=2))
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


def _comparison(runs: Sequence[Row], curves: Sequence[Row], looks: Looks, panels: Sequence[str]) -> Any:
    width = style.PANEL * len(panels)
    figure, axes = style.new_figure(
        1, len(panels), width=width, height=2.9, below=lines.legend_height(list(looks), width)
    )
    beyond = _far_off(runs, list(looks), loss_column(runs)[0])
    for axis, panel in zip(axes[0], panels, strict=True):
        if panel == FINALS:
            _finals(axis, runs, looks, beyond)
        else:
            _curves(axis, curves, looks, beyond)
    lines.legend(figure, looks, markers=True)
    return figure


def _finals(axis: Any, runs: Sequence[Row], looks: Looks, beyond: str | None) -> None:
    """A point for every run; the legend names the arms, whose names would not fit side by side."""
    column, label = loss_column(runs)
    for place, (arm, look) in enumerate(looks.items()):
        values = [float(row[column]) for row in runs if row["arm"] == arm]
        if arm == beyond:
            axis.text(
                place,
                0.97,
                f"{np.mean(values):.2f}\nnot to\nscale",
                color=look.color,
                fontsize=8,
                ha="center",
                va="top",
                transform=axis.get_xaxis_transform(),
            )
        else:
            axis.plot([place] * len(values), values, look.marker, color=look.color, alpha=0.5, ms=5)
            axis.plot([place - 0.3, place + 0.3], [np.mean(values)] * 2, color=look.color, lw=2.5)
    axis.set_xticks([])
    axis.set_xlim(-0.6, len(looks) - 0.4)
    axis.set_ylabel(label, fontsize=9)


def _curves(axis: Any, curves: Sequence[Row], looks: Looks, beyond: str | None) -> None:
    courses: dict[str, Course] = {}
    for arm in looks:
        at = _by_step([row for row in curves if row["arm"] == arm], "validation_loss")
        courses[arm] = lines.course(list(at), [float(np.mean(v)) for v in at.values()])
    lines.draw(axis, looks, courses, marked=True)
    end = max(float(row["step"]) for row in curves)
    # What happens in the first steps, and an arm that is far off, would hide the rest.
    axis.set_ylim(lines.late_limits([own for arm, own in courses.items() if arm != beyond], end))
    _steps_axis(axis, end)
    axis.set_ylabel("validation loss", fontsize=9)


def _steps_axis(axis: Any, end: float) -> None:
    axis.set_xlim(0, 1.03 * end)
    style.count_axis(axis.xaxis)
    axis.set_xlabel("training step", fontsize=9)


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
    by_arm = {arm: _by_domain(weights, arm) for arm in arms}
    looks = lines.chosen(_greatest(by_arm))
    others = len({domain for domains in by_arm.values() for domain in domains}) - len(looks)
    width = style.PANEL * len(arms)
    below = lines.legend_height(lines.legend_labels(looks, others=others), width)
    figure, axes = style.new_figure(1, len(arms), width=width, height=2.9, below=below)
    for axis, (arm, domains) in zip(axes[0], by_arm.items(), strict=True):
        courses: dict[str, Course] = {}
        for domain, rows in domains.items():
            at = _by_step(rows, "weight")
            means = [float(np.mean(v)) for v in at.values()]
            courses[domain] = lines.course(list(at), means, named=domain in looks)
            if domain in looks:
                low, high = [min(v) for v in at.values()], [max(v) for v in at.values()]
                color = looks[domain].color
                axis.fill_between(list(at), low, high, color=color, alpha=0.15, lw=0, step="post")
        lines.draw(axis, looks, courses, steps=True)
        axis.set_ylim(0, lines.weight_limit(courses))
        axis.set_ylabel("weight", fontsize=9)
        _steps_axis(axis, max(float(row["step"]) for row in weights))
        if len(arms) > 1:
            title = style.short(arm, 10, 72 * (style.PANEL - 0.7))
            axis.set_title(style.plain(title), fontsize=10, color=style.INK)
    lines.legend(figure, looks, others=others)
    return figure


def _greatest(by_arm: Mapping[str, Mapping[str, Sequence[Row]]]) -> dict[str, float]:
    """The greatest last weight of each domain in any arm."""
    found: dict[str, float] = {}
    for domains in by_arm.values():
        for domain, rows in domains.items():
            last = float(np.mean(list(_by_step(rows, "weight").values())[-1]))
            found[domain] = max(found.get(domain, 0.0), last)
    return found


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
