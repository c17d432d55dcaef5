"""The pictures of training runs: a panel for each run, and the losses of all in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mixwell.report import lines, style
from mixwell.report.lines import Course, Looks
from mixwell.report.run_summary import RunSummary

FEW = 60
"""Of so many rounds the standard errors are shown."""


@final
@dataclass(frozen=True)
class Kind:
    """A kind of panel.

    Args:
        draw: puts a run's lines into an axis.
        label: of the axis from below to above.
        shared: whether all runs have the same limits, so that they can be compared.
    """

    draw: Callable[[Any, RunSummary, Looks], None]
    label: str
    shared: bool = True


@final
@dataclass(frozen=True)
class Drawn:
    """Pictures of one kind.

    Args:
        together: all runs side by side.
        apart: one picture for each run.
    """

    together: Any
    apart: Sequence[Any]


def domains(runs: Sequence[RunSummary]) -> Looks:
    """How the lines of domains look: the same in all pictures.

    Args:
        runs: what is shown.

    Returns:
        Those that are named: the greatest by the last weight in any of the runs in which weights were learned.
    """
    greatest: dict[str, float] = {}
    for run in runs:
        for name, weight in run.mixture["weights"]["last"].items():
            counts = weight if run.learned or not any(one.learned for one in runs) else 0.0
            greatest[name] = max(greatest.get(name, 0.0), counts)
    return lines.chosen(greatest)


def draw(kind: Kind, runs: Sequence[RunSummary], looks: Looks) -> Drawn:
    """Draw runs, side by side for files, and each alone for a page, where small screens show one at a time.

    Args:
        kind: of panel.
        runs: what is shown.
        looks: of the domains.

    Returns:
        The pictures.
    """
    together, axes = _panels(kind, runs, looks, titles=len(runs) > 1)
    if len(runs) == 1:
        return Drawn(together, [together])
    apart: list[Any] = []
    for run, beside in zip(runs, axes, strict=True):
        figure, own = _panels(kind, [run], looks, titles=True)
        if kind.shared:
            own[0].set_ylim(beside.get_ylim())
        apart.append(figure)
    return Drawn(together, apart)


def overlay(runs: Sequence[RunSummary]) -> Any:
    """The validation losses of all runs in one picture.

    Args:
        runs: what is shown.

    Returns:
        The figure.
    """
    several = len(runs) > 1
    looks = {run.name: look for run, look in zip(runs, style.looks(len(runs)), strict=True)}
    below = lines.legend_height(list(looks), style.PANEL) if several else 0.0
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=2.9, below=below)
    axis = axes[0, 0]
    courses: dict[str, Course] = {}
    for run in runs:
        told = [line for line in run.evaluations if "validation" in line["losses"]]
        steps = [line["step"] for line in told]
        courses[run.name] = lines.course(steps, [line["losses"]["validation"] for line in told])
    lines.draw(axis, looks, courses, marked=several)
    end = max(run.mixture["budget"] for run in runs)
    axis.set_ylim(lines.late_limits(list(courses.values()), end))
    _finish(axis, end, "validation loss")
    if several:
        lines.legend(figure, looks, markers=True)
    return figure


# ------------------------------------------------------------------------------------------------- panels


def _panels(kind: Kind, runs: Sequence[RunSummary], looks: Looks, *, titles: bool) -> tuple[Any, list[Any]]:
    names = dict.fromkeys(name for run in runs for name in run.domains)
    shown = {name: look for name, look in looks.items() if name in names}
    others = len(names) - len(shown)
    columns = min(len(runs), 3)
    width = style.PANEL * columns
    below = lines.legend_height(lines.legend_labels(shown, others=others), width)
    figure, axes = style.new_figure(-(-len(runs) // columns), columns, width=width, height=2.9, below=below)
    own = list(axes.flat[: len(runs)])
    for axis, run in zip(own, runs, strict=True):
        kind.draw(axis, run, looks)
        _finish(axis, run.mixture["budget"], kind.label)
        if titles:
            title = style.short(run.name, 10, 72 * (style.PANEL - 0.7))
            axis.set_title(style.plain(title), fontsize=10, color=style.INK)
    if kind.shared:
        low, high = zip(*(axis.get_ylim() for axis in own), strict=True)
        for axis in own:
            axis.set_ylim(min(low), max(high))
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    lines.legend(figure, shown, others=others)
    return figure, own


def _finish(axis: Any, end: int, label: str) -> None:
    axis.set_xlim(0, 1.03 * end)  # with room for what happens at the last step
    style.count_axis(axis.xaxis)
    axis.set_xlabel("training step", fontsize=9)
    axis.set_ylabel(label, fontsize=9)


def _weights(axis: Any, run: RunSummary, looks: Looks) -> None:
    history = run.mixture["history"]
    steps = [point["step"] for point in history]
    # The last weights are those of the last update; they are drawn to where training came.
    ends = [*steps, max(run.mixture["steps_done"], steps[-1])]
    courses: dict[str, Course] = {}
    for name in run.domains:
        values = [point["weights"][name] for point in history]
        courses[name] = lines.course(ends, [*values, values[-1]], named=name in looks)
        if name in looks:
            axis.plot(ends[-1], values[-1], "o", ms=4, color=looks[name].color)
    lines.draw(axis, looks, courses, steps=True)
    axis.set_ylim(0, lines.weight_limit(courses))


def _losses(axis: Any, run: RunSummary, looks: Looks) -> None:
    courses: dict[str, Course] = {}
    for name in run.domains:
        points = [(line["step"], line["losses"][name]) for line in run.steps if name in line["losses"]]
        steps, losses = zip(*points, strict=True) if points else ((), ())
        courses[name] = lines.course(steps, losses, mean=True, named=name in looks)
    lines.draw(axis, looks, courses)
    limits = lines.late_limits(list(courses.values()), run.mixture["steps_done"])
    if limits is not None:
        axis.set_ylim(limits)


def _rows(axis: Any, run: RunSummary, looks: Looks) -> None:
    steps = [0, *(line["step"] for line in run.steps)]
    seen = {name: np.cumsum([0, *(at["counts"].get(name, 0) for at in run.steps)]) for name in run.domains}
    courses = {name: lines.course(steps, own.tolist(), named=name in looks) for name, own in seen.items()}
    lines.draw(axis, looks, courses)
    style.count_axis(axis.yaxis)
    axis.set_ylim(bottom=0)


def _hypergradients(axis: Any, run: RunSummary, looks: Looks) -> None:
    rounds = [line for line in run.rounds if line["scores"]]
    steps = [line["step"] for line in rounds]
    courses = {
        name: lines.course(steps, [line["scores"][name] for line in rounds], mean=True, named=name in looks)
        for name in run.domains
    }
    axis.axhline(0, color=style.INK, lw=0.6, zorder=1)
    lines.draw(axis, looks, courses)
    if len(rounds) > FEW:
        return
    shown = [name for name in looks if name in courses]
    wide = run.mixture["budget"] / 250  # so that bars of different domains stand beside each other
    for place, name in enumerate(shown):
        x, y = courses[name]
        errors = [line["noise"].get(name) or 0.0 for line in rounds]
        shifted = x + (place - (len(shown) - 1) / 2) * wide
        axis.errorbar(shifted, y, yerr=errors, fmt="o", color=looks[name].color, lw=1, ms=2.5)


KINDS: Mapping[str, Kind] = {
    "weights": Kind(_weights, "weight"),
    "losses": Kind(_losses, "training loss"),
    "rows": Kind(_rows, "rows seen"),
    "hypergradients": Kind(_hypergradients, "hypergradient", shared=False),
}
