"""Figures of training runs: one panel per run and quantity, and the validation losses of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mixwell.report import style
from mixwell.report.run_summary import RunSummary
from mixwell.report.style import LineStyles, Points

FEW_ROUNDS = 60
"""Standard errors are shown up to this number of rounds."""


@final
@dataclass(frozen=True)
class PanelKind:
    """A kind of panel.

    Args:
        draw: draws a run's lines into an axis.
        label: label of the y axis.
        shared: whether all runs have the same limits, so that they can be compared.
    """

    draw: Callable[[Any, RunSummary, LineStyles], None]
    label: str
    shared: bool = True


@final
@dataclass(frozen=True)
class Figures:
    """Figures of one kind.

    Args:
        together: all runs in one figure.
        apart: one figure per run.
    """

    together: Any
    apart: Sequence[Any]


def domain_styles(runs: Sequence[RunSummary]) -> LineStyles:
    """Return the line styles of domains in all figures, by their last weight in runs that learned weights."""
    largest: dict[str, float] = {}
    for run in runs:
        for name, weight in run.mixture["weights"]["last"].items():
            counts = weight if run.learned or not any(one.learned for one in runs) else 0.0
            largest[name] = max(largest.get(name, 0.0), counts)
    return style.style_largest(largest)


def draw(kind: PanelKind, runs: Sequence[RunSummary], styles: LineStyles) -> Figures:
    """Draw runs in one figure for files, and each in its own for a page, which may be on a small screen."""
    together, axes = _panels(kind, runs, styles, titles=len(runs) > 1)
    if len(runs) == 1:
        return Figures(together, [together])
    apart: list[Any] = []
    for run, other in zip(runs, axes, strict=True):
        figure, own = _panels(kind, [run], styles, titles=True)
        if kind.shared:
            own[0].set_ylim(other.get_ylim())
        apart.append(figure)
    return Figures(together, apart)


def overlay(runs: Sequence[RunSummary]) -> Any:
    """Draw the validation losses of all runs in one panel."""
    several = len(runs) > 1
    styles = dict(zip((run.name for run in runs), style.line_styles(len(runs)), strict=True))
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=2.9)
    axis = axes[0, 0]
    lines: dict[str, Points] = {}
    for run in runs:
        known = [line for line in run.evaluations if "validation" in line["losses"]]
        steps = [line["step"] for line in known]
        lines[run.name] = style.thin(steps, [line["losses"]["validation"] for line in known])
    style.draw_lines(axis, styles, lines, marked=several)
    end = max(run.mixture["budget"] for run in runs)
    axis.set_ylim(style.late_limits(list(lines.values()), end))
    _label_axes(axis, end, "validation loss")
    if several:
        style.legend(figure, styles, markers=True)
    return figure


def _panels(
    kind: PanelKind, runs: Sequence[RunSummary], styles: LineStyles, *, titles: bool
) -> tuple[Any, list[Any]]:
    names = dict.fromkeys(name for run in runs for name in run.domains)
    shown = {name: own for name, own in styles.items() if name in names}
    columns = min(len(runs), 3)
    figure, axes = style.new_figure(
        -(-len(runs) // columns), columns, width=style.PANEL * columns, height=2.9
    )
    own = list(axes.flat[: len(runs)])
    for axis, run in zip(own, runs, strict=True):
        kind.draw(axis, run, styles)
        _label_axes(axis, run.mixture["budget"], kind.label)
        if titles:
            axis.set_title(style.label(run.name, 36), fontsize=10, color=style.INK)
    if kind.shared:
        low, high = zip(*(axis.get_ylim() for axis in own), strict=True)
        for axis in own:
            axis.set_ylim(min(low), max(high))
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    style.legend(figure, shown, others=len(names) - len(shown))
    return figure, own


def _label_axes(axis: Any, end: int, label: str) -> None:
    axis.set_xlim(0, 1.03 * end)  # with a margin for markers at the last step
    style.count_axis(axis.xaxis)
    axis.set_xlabel("training step", fontsize=9)
    axis.set_ylabel(label, fontsize=9)


def _weights(axis: Any, run: RunSummary, styles: LineStyles) -> None:
    history = run.mixture["history"]
    steps = [point["step"] for point in history]
    # The last update's weights are drawn up to the last step that was trained.
    ends = [*steps, max(run.mixture["steps_done"], steps[-1])]
    lines: dict[str, Points] = {}
    for name in run.domains:
        values = [point["weights"][name] for point in history]
        lines[name] = style.thin(ends, [*values, values[-1]], named=name in styles)
        if name in styles:
            axis.plot(ends[-1], values[-1], "o", ms=4, color=styles[name].color)
    style.draw_lines(axis, styles, lines, steps=True)
    largest = max(float(y.max()) for _, y in lines.values())
    axis.set_ylim(0, 1.02 if largest > 0.5 else 1.1 * largest)


def _losses(axis: Any, run: RunSummary, styles: LineStyles) -> None:
    lines: dict[str, Points] = {}
    for name in run.domains:
        points = [(line["step"], line["losses"][name]) for line in run.steps if name in line["losses"]]
        steps, losses = zip(*points, strict=True) if points else ((), ())
        lines[name] = style.thin(steps, losses, mean=True, named=name in styles)
    style.draw_lines(axis, styles, lines)
    limits = style.late_limits(list(lines.values()), run.mixture["steps_done"])
    if limits is not None:
        axis.set_ylim(limits)


def _rows(axis: Any, run: RunSummary, styles: LineStyles) -> None:
    steps = [0, *(line["step"] for line in run.steps)]
    seen = {name: np.cumsum([0, *(at["counts"].get(name, 0) for at in run.steps)]) for name in run.domains}
    lines = {name: style.thin(steps, own.tolist(), named=name in styles) for name, own in seen.items()}
    style.draw_lines(axis, styles, lines)
    style.count_axis(axis.yaxis)
    axis.set_ylim(bottom=0)


def _hypergradients(axis: Any, run: RunSummary, styles: LineStyles) -> None:
    rounds = [line for line in run.rounds if line["scores"]]
    steps = [line["step"] for line in rounds]
    lines = {
        name: style.thin(steps, [line["scores"][name] for line in rounds], mean=True, named=name in styles)
        for name in run.domains
    }
    axis.axhline(0, color=style.INK, lw=0.6, zorder=1)
    style.draw_lines(axis, styles, lines)
    if len(rounds) > FEW_ROUNDS:
        return
    shown = [name for name in styles if name in lines]
    offset = run.mixture["budget"] / 250  # so that the error bars of domains do not coincide
    for place, name in enumerate(shown):
        x, y = lines[name]
        errors = [line["noise"].get(name) or 0.0 for line in rounds]
        shifted = x + (place - (len(shown) - 1) / 2) * offset
        axis.errorbar(shifted, y, yerr=errors, fmt="o", color=styles[name].color, lw=1, ms=2.5)


PANEL_KINDS: Mapping[str, PanelKind] = {
    "weights": PanelKind(_weights, "weight"),
    "losses": PanelKind(_losses, "training loss"),
    "rows": PanelKind(_rows, "rows seen"),
    "hypergradients": PanelKind(_hypergradients, "hypergradient", shared=False),
}
