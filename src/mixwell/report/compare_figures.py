"""Figures of a comparison: losses, the effect of the horizon, costs, and losses over training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from mixwell.lab.compare.standings import (
    BEST,
    PROPORTIONAL,
    UNIFORM,
    WITHIN_NOISE,
    HorizonEffect,
    Standing,
    of_method,
)
from mixwell.lab.compare.summary import format_loss
from mixwell.lab.tables import Row, column
from mixwell.report import style
from mixwell.report.style import LineStyle, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: Mapping[str, LineStyle] = {
    "online": LineStyle(style.COLORS[0], "-", "o"),
    "offline": LineStyle(style.COLORS[1], "-", "s"),
    "static": LineStyle(style.COLORS[6], "-", "^"),
}
COSTS: Mapping[str, tuple[Callable[[Standing], float], str]] = {
    "seconds": (lambda one: one.seconds, "seconds, trials included"),
    "compute": (lambda one: one.compute, "compute in training steps, trials included"),
    "steps": (lambda one: one.steps, "training steps of the last run"),
}
OTHER = LineStyle(style.FAINT, "-", ".")
"""Of the points that the legend does not name."""
ROW, LETTERS, NAME = 0.2, 8.0, 26
"""Height of a row in inches, font size in points, and characters of a name in the row plots."""
FAR = 6.0
BAND = "#e8f1f7"
BEST_SHOWN = 6
LATE = 0.25
"""Fraction of a curve over training after which the limits of the axis are chosen."""


def limits(found: Sequence[Standing]) -> tuple[float, float]:
    """Return limits of a loss axis that leave out outliers above, so that they do not squeeze the others.

    Outliers lie more than six interquartile ranges above the upper quartile of all runs (of wider quantiles if the
    quartiles are equal).
    """
    values = np.array([loss for one in found for loss in one.losses.values() if math.isfinite(loss)])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    for fraction in (0.25, 0.1):
        below, above = np.quantile(values, [fraction, 1 - fraction])
        if above > below:
            high = float(values[values <= above + FAR * (above - below)].max())
            break
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def losses(found: Sequence[Standing], label: str) -> Figure:
    """Draw a row per entry, the best on top: a point per seed and a bar at the mean."""
    figure, axis = _rows([one.name for one in found], f"{label} (mean at the right)")
    low, high = limits(found)
    handles = _handles({kind: own for kind, own in KINDS.items() if any(one.kind == kind for one in found)})
    uniform = of_method(found, UNIFORM)
    if uniform is not None and uniform.mean <= high:
        handles["uniform’s mean"] = axis.axvline(
            uniform.mean, color=style.GRAY, ls=style.DASHES[1], lw=1, zorder=1.5
        )
    for place, one in enumerate(found):
        own = KINDS.get(one.kind, KINDS["static"])
        if one.status in (BEST, WITHIN_NOISE):
            axis.axhspan(place - 0.5, place + 0.5, color=BAND, lw=0, zorder=0.5)
        inside = [loss for loss in one.losses.values() if loss <= high]
        several = len(one.losses) > 1
        alpha = 0.45 if several else 1.0
        axis.plot(inside, [place] * len(inside), own.marker, color=own.color, alpha=alpha, ms=4.5, mew=0)
        if any(loss > high for loss in one.losses.values()):
            _arrow(axis, place, own.color)
        if several and one.mean <= high:
            axis.plot([one.mean] * 2, [place - 0.36, place + 0.36], color=own.color, lw=2.2)
    axis.set_xlim(low, high)
    _right_labels(axis, [format_loss(one.mean) for one in found])
    style.legend_below(figure, handles)
    return figure


def horizons(effects: Sequence[HorizonEffect], label: str) -> Figure:
    """Draw a row per method: its mean loss with the shortest and with the longest horizon."""
    ends = {
        "shortest horizon": LineStyle(style.COLORS[4], "-", "s"),
        "longest horizon": LineStyle(style.COLORS[0], "-", "o"),
    }
    names = [f"{one.entry}, T {one.runs[0].horizon} → {one.runs[-1].horizon}" for one in effects]
    figure, axis = _rows(names, f"mean {label} (change at the right)")
    low, high = limits([run for one in effects for run in one.runs])
    for place, one in enumerate(effects):
        pair = one.runs[0], one.runs[-1]
        x = [min(run.mean, high) for run in pair]
        axis.plot(x, [place] * 2, color=style.FAINT, lw=2.5, zorder=1.5, solid_capstyle="butt")
        for run, own in zip(pair, ends.values(), strict=True):
            if run.mean <= high:
                axis.plot(run.mean, place, own.marker, color=own.color, ms=6)
            elif math.isfinite(run.mean):
                _arrow(axis, place, own.color)
    axis.set_xlim(low, high)
    changes = [one.change.mean for one in effects]
    _right_labels(axis, [f"{one:+.4f}" if math.isfinite(one) else "" for one in changes])
    style.legend_below(figure, _handles(ends))
    return figure


def costs(found: Sequence[Standing]) -> list[str]:
    """Return the keys of :data:`COSTS` to draw: seconds, and those that differ by more than 2%."""
    shown = ["seconds"]
    for name in ("compute", "steps"):
        values = [value for one in found if math.isfinite(value := COSTS[name][0](one))]
        if values and max(values) > 1.02 * min(values):
            shown.append(name)
    return shown


def cost(found: Sequence[Standing], name: str, label: str) -> Figure:
    """Draw the mean loss against a cost; the legend names the best of each kind and the baselines."""
    spent, text = COSTS[name]
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=3.2)
    axis = axes[0, 0]
    low, high = limits(found)
    named = dict(zip(_named(found), style.line_styles(len(found)), strict=False))
    finite = [one for one in found if math.isfinite(one.mean) and math.isfinite(spent(one))]
    for one in sorted(finite, key=lambda one: one.name in named):
        own = named.get(one.name, OTHER)
        marker = r"$\uparrow$" if one.mean > high else own.marker
        y = min(one.mean, low + 0.97 * (high - low))
        axis.plot(spent(one), y, ls="", marker=marker, color=own.color, ms=6.0, mew=0)
    budgets = {one.budget for one in found}
    if name == "compute" and len(budgets) == 1 and all(map(math.isfinite, budgets)):
        axis.axvline(*budgets, color=style.GRAY, ls=style.DASHES[3], lw=1, zorder=1.5)
    values = [spent(one) for one in finite]
    if values and 0 < 20 * min(values) < max(values):
        style.log_axis(axis, text)
    else:
        style.count_axis(axis.xaxis)
        axis.set_xlim(0, 1.05 * max(values, default=1.0))
        axis.set_xlabel(text, fontsize=9)
    axis.set_ylim(low, high)
    axis.set_ylabel(f"mean {label}", fontsize=9)
    others = {f"{len(found) - len(named)} others": OTHER} if len(found) > len(named) else {}
    handles = _handles(named | others)
    style.legend_below(figure, handles)
    return figure


def curves(rows: Sequence[Row], found: Sequence[Standing]) -> dict[str, Points]:
    """Return validation loss over compute, mean over the seeds, of the best entries and the baselines.

    Entries that are outliers are left out, and so are points that some seeds do not have.
    """
    high = limits(found)[1]
    shown = [one for one in (*found[:BEST_SHOWN], *_baselines(found)) if one.mean <= high]
    lines: dict[str, Points] = {}
    for name in dict.fromkeys(one.name for one in shown):
        own = [row for row in rows if str(row["variant"]) == name and row.get("validation_loss", "") != ""]
        seeds = len({row["seed"] for row in own})
        by_step: dict[int, list[Row]] = {}
        for row in own:
            by_step.setdefault(int(row["step"]), []).append(row)
        points = [by_step[step] for step in sorted(by_step) if len(by_step[step]) == seeds]
        if points:
            x, y = ([fmean(column(some, key)) for some in points] for key in ("compute", "validation_loss"))
            lines[name] = style.thin(x, y)
    return lines


def over_training(lines: Mapping[str, Points]) -> Figure:
    """Draw validation losses over compute; methods that train other runs first start later."""
    styles = dict(zip(lines, style.line_styles(len(lines)), strict=True))
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=3.2)
    axis = axes[0, 0]
    style.draw_lines(axis, styles, lines, marked=True)
    # Relative to its own start and end, since the initial drop of a line that starts late is late.
    own = [((x - x[0]) / ((x[-1] - x[0]) or 1.0), y) for x, y in lines.values()]
    axis.set_ylim(style.late_limits(own, 1.0, early=LATE))
    axis.set_xlim(0, 1.03 * max(float(x[-1]) for x, _ in lines.values()))
    style.count_axis(axis.xaxis)
    axis.set_xlabel("compute so far, in training steps", fontsize=9)
    axis.set_ylabel("validation loss", fontsize=9)
    style.legend(figure, styles, markers=True)
    return figure


def _named(found: Sequence[Standing]) -> list[str]:
    """Return the names of all entries if they are few; else of the best of each kind and the baselines."""
    if len(found) <= len(style.COLORS):
        return [one.name for one in found]
    best = [own[0] for kind in KINDS if (own := [one for one in found if one.kind == kind])]
    return list(dict.fromkeys(one.name for one in (found[0], *best, *_baselines(found))))


def _baselines(found: Sequence[Standing]) -> list[Standing]:
    return [one for method in (UNIFORM, PROPORTIONAL) if (one := of_method(found, method)) is not None]


def _rows(names: Sequence[str], text: str) -> tuple[Figure, Any]:
    """Return a panel with a row per name, the first on top."""
    height = max(1.4, ROW * len(names)) + 0.65
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=height)
    axis = axes[0, 0]
    axis.set_yticks(range(len(names)), [style.label(name, NAME) for name in names])
    axis.tick_params(axis="y", labelsize=LETTERS, length=0)
    axis.tick_params(axis="x", labelsize=LETTERS)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(False)
    axis.grid(axis="x", color="#eeeeee", lw=0.8)
    axis.spines["left"].set_visible(False)
    axis.locator_params(axis="x", nbins=3)
    axis.set_xlabel(text, fontsize=9)
    return figure, axis


def _handles(styles: Mapping[str, LineStyle]) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    return {
        name: Line2D([], [], color=own.color, marker=own.marker, ls="", ms=5) for name, own in styles.items()
    }


def _arrow(axis: Any, place: int, color: str) -> None:
    """Mark a value beyond the right edge."""
    transform = axis.get_yaxis_transform()
    axis.plot(1, place, ">", color=color, ms=5, mew=0, transform=transform, clip_on=False, zorder=4)


def _right_labels(axis: Any, texts: Sequence[str]) -> None:
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts)
    right.tick_params(labelsize=LETTERS, length=0, pad=6)
    right.spines["right"].set_visible(False)
