"""Pictures of a comparison that have a line for each arm, or for each method: losses, weights, horizons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mixwell.report import lines, style
from mixwell.report.compare_words import written
from mixwell.report.standings import BEST, NOISE, NOT_FINITE, UNIFORM, Pair, Standing, of_method
from mixwell.report.style import Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: Mapping[str, Look] = {
    "online": Look(style.COLOURS[0], "-", "o"),
    "offline": Look(style.COLOURS[1], "-", "s"),
    "static": Look(style.COLOURS[6], "-", "^"),
}
"""How the points of each kind of method look."""
LETTERS = 8.0
ROW, LEAST = 0.2, 1.4  # inches: a line, and the least height of a panel
NAMES = 0.36  # of the width may be names
UPRIGHT = 1.1  # inches of names above cells
FAR = 6.0
BAND = "#e8f1f7"
LINE = "uniform’s mean"
KEY = 1.5 * style.SMALL / 72
"""Inches that :func:`key` takes."""
DOMAINS = 10
"""So many domains are shown; where there are more, the greatest and the sum of the others."""
COLUMNS = 8
DARK = 0.85  # of the darkest shade, from where white letters are read better than dark ones


def limits(found: Sequence[Standing]) -> tuple[float, float]:
    """Limits of an axis of losses in which what is far off does not squeeze the others.

    Far off is what lies further above the upper quartile of all runs than six times the distance of the quartiles
    (of wider quantiles, where more than half of the losses are the same). What is far below is what a reader looks
    for, and stays.

    Args:
        found: the arms; losses that are not finite are left out.

    Returns:
        From and to, with some room.
    """
    values = np.array([loss for one in found for loss in one.losses.values() if math.isfinite(loss)])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    for share in (0.25, 0.1):
        below, above = np.quantile(values, [share, 1 - share])
        if above > below:
            high = float(values[values <= above + FAR * (above - below)].max())
            break
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def losses(found: Sequence[Standing], label: str, *, width: float = style.PANEL) -> Figure:
    """A line for each arm, the best above: a point for each seed, and a bar for the mean of several.

    Args:
        found: the arms, in their order.
        label: what the loss is of.
        width: of the figure in inches.

    Returns:
        The figure; the arms within the noise of the best have a band behind them.
    """
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in found)]
    figure, axis = _panel([one.arm for one in found], width, below=KEY)
    low, high = limits(found)
    base = of_method(found, UNIFORM)
    if base is not None and base.mean <= high:
        axis.axvline(base.mean, color="#777777", ls=style.DASHES[1], lw=1, zorder=1.5)
    for place, one in enumerate(found):
        look = KINDS.get(one.kind, KINDS["static"])
        if one.beside_best in (BEST, NOISE):
            axis.axhspan(place - 0.5, place + 0.5, color=BAND, lw=0, zorder=0.5)
        inside = [loss for loss in one.losses.values() if loss <= high]
        several = len(one.losses) > 1
        alpha = 0.45 if several else 1.0
        axis.plot(inside, [place] * len(inside), look.marker, color=look.color, alpha=alpha, ms=4.5, mew=0)
        if any(loss > high for loss in one.losses.values()):
            _arrow(axis, place, look.color)
        if several and one.mean <= high:
            axis.plot([one.mean] * 2, [place - 0.36, place + 0.36], color=look.color, lw=2.2)
    axis.set_xlim(low, high)
    _numbers(axis, "mean", [written(one.mean) for one in found])
    axis.set_xlabel(label, fontsize=9)
    key(figure, kinds, uniform=base is not None)
    return figure


def weights(found: Sequence[Standing], *, width: float = style.PANEL) -> Figure | None:
    """A line for each arm in the same order, a cell for the average weight of each domain.

    Args:
        found: the arms with their weights, in their order.
        width: of the figure in inches.

    Returns:
        The figure; ``None`` where no weights are known.
    """
    arms = [one for one in found if one.weights]
    if not arms:
        return None
    named, others = shown_domains(arms)
    columns = [*named, *([f"{len(others)} others"] if others else [])]
    cells = np.array([[one.weights.get(name, math.nan) for name in named] for one in arms])
    longest = max(style.text_width(name, LETTERS) for name in columns)
    upright = longest > _cell_width([one.arm for one in arms], width, len(columns))
    room = min(longest, 72 * UPRIGHT)
    above = (room if upright else LETTERS) / 72 + 0.1
    figure, axis = _panel([one.arm for one in arms], width, above=above, labeled=False)
    most = float(np.nanmax(cells))
    axis.pcolormesh(
        np.arange(len(named) + 1) - 0.5,
        np.arange(len(arms) + 1) - 0.5,
        np.ma.masked_invalid(cells),
        cmap=_shades(),
        vmin=0,
        vmax=most,
        edgecolors="white",
        lw=0.6,
    )
    for place, one in enumerate(arms):
        for column, weight in enumerate(cells[place]):
            if math.isfinite(weight):
                color = "white" if weight > DARK * most else style.INK
                _cell(axis, column, place, f"{100 * weight:.{1 if others else 0}f}", color)
        if others:
            rest = sum(one.weights.get(name, 0.0) for name in others)
            _cell(axis, len(named), place, f"{100 * rest:.0f}", "#777777")
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.xaxis.tick_top()
    axis.grid(False)
    axis.tick_params(axis="x", length=0)
    axis.set_xticks(range(len(columns)), [style.plain(style.short(name, LETTERS, room)) for name in columns])
    for text in axis.get_xticklabels():
        text.set(rotation=90 if upright else 0, fontsize=LETTERS)
    axis.spines[:].set_visible(False)
    return figure


def horizons(made: Sequence[Pair], label: str, *, width: float = style.PANEL) -> Figure:
    """A line for each method: the mean loss with the shortest horizon and with the longest.

    Args:
        made: the methods, in their order.
        label: what the loss is of.
        width: of the figure in inches.

    Returns:
        The figure; other horizons are small points between.
    """
    from matplotlib.lines import Line2D

    shorter, longer = style.COLOURS[4], style.COLOURS[0]
    names = [f"{pair.entry}, T {pair.arms[0].horizon} → {pair.arms[-1].horizon}" for pair in made]
    words = ["shortest horizon", "longest horizon"]
    figure, axis = _panel(names, width, below=KEY)
    low, high = limits([arm for pair in made for arm in pair.arms])
    for place, pair in enumerate(made):
        ends = [min(arm.mean, high) for arm in (pair.arms[0], pair.arms[-1])]
        axis.plot(ends, [place] * 2, color=style.FAINT, lw=2.5, zorder=1.5, solid_capstyle="butt")
        for arm in pair.arms[1:-1]:
            if arm.mean <= high:
                axis.plot(arm.mean, place, "o", color="#888888", ms=3)
        for arm, color, marker in ((pair.arms[0], shorter, "s"), (pair.arms[-1], longer, "o")):
            if arm.mean <= high:
                axis.plot(arm.mean, place, marker, color=color, ms=6)
            elif math.isfinite(arm.mean):
                _arrow(axis, place, color)
    axis.set_xlim(low, high)
    changes = [pair.change.mean for pair in made]
    _numbers(axis, "change", [f"{one:+.4f}" if math.isfinite(one) else NOT_FINITE for one in changes])
    axis.set_xlabel(f"mean {label}", fontsize=9)
    handles = [
        Line2D([], [], color=color, marker=marker, ls="", ms=6)
        for color, marker in ((shorter, "s"), (longer, "o"))
    ]
    _legend(figure, handles, words)
    return figure


def shown_domains(found: Sequence[Standing]) -> tuple[list[str], list[str]]:
    """The domains that have a place of their own: all where they are few, else those that are great in any arm.

    Args:
        found: arms with weights.

    Returns:
        These and the others, both in the order of the config.
    """
    greatest: dict[str, float] = {}
    for one in found:
        for name, weight in one.weights.items():
            greatest[name] = max(greatest.get(name, 0.0), weight)
    if len(greatest) <= DOMAINS:
        return list(greatest), []
    kept = set(sorted(greatest, key=greatest.__getitem__, reverse=True)[:COLUMNS])
    return [name for name in greatest if name in kept], [name for name in greatest if name not in kept]


def key(figure: Figure, kinds: Sequence[str], *, uniform: bool = False) -> None:
    """Tell below the panels what the points mean, and the broken line.

    Args:
        figure: with room for it.
        kinds: of methods that are shown.
        uniform: whether a line is at the loss of uniform weights.
    """
    from matplotlib.lines import Line2D

    looks = [KINDS[kind] for kind in kinds]
    handles = [Line2D([], [], color=look.color, marker=look.marker, ls="", ms=5) for look in looks]
    if uniform:
        handles.append(Line2D([], [], color="#777777", ls=style.DASHES[1], lw=1))
    _legend(figure, handles, [*kinds, *([LINE] if uniform else [])])


def _panel(
    names: Sequence[str], width: float, *, above: float = 0.0, below: float = 0.0, labeled: bool = True
) -> tuple[Figure, Any]:
    """A panel with a line for each name, the first above."""
    height = max(LEAST, ROW * len(names)) + (0.65 if labeled else 0.1) + above
    figure, axes = style.new_figure(1, 1, width=width, height=height, below=below)
    axis = axes[0, 0]
    room = 72 * NAMES * width
    axis.set_yticks(range(len(names)), [style.plain(style.short(name, LETTERS, room)) for name in names])
    axis.tick_params(axis="y", labelsize=LETTERS, length=0)
    axis.tick_params(axis="x", labelsize=LETTERS)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(False)
    axis.grid(axis="x", color="#eeeeee", lw=0.8)
    axis.spines["left"].set_visible(False)
    axis.locator_params(axis="x", nbins=4 if width < 5 else 8)
    return figure, axis


def _arrow(axis: Any, place: int, color: str) -> None:
    """At the edge beyond which there is more."""
    across = axis.get_yaxis_transform()
    axis.plot(1, place, ">", color=color, ms=5, mew=0, transform=across, clip_on=False, zorder=4)


def _numbers(axis: Any, title: str, texts: Sequence[str]) -> None:
    """A column of numbers at the right of the lines."""
    for place, text in ((-1, title), *enumerate(texts)):
        # The title is half a line nearer, so that there is no gap above the first number.
        y = place if place >= 0 else -0.9
        axis.text(
            1.03,
            y,
            text,
            transform=axis.get_yaxis_transform(),
            fontsize=LETTERS,
            color=style.INK if place >= 0 else "#777777",
            va="center",
        )


def _cell_width(names: Sequence[str], width: float, columns: int) -> float:
    """Points that a cell has, beside the names of the arms, less some room between words."""
    beside = min(max(style.text_width(name, LETTERS) for name in names), 72 * NAMES * width)
    return (72 * width - beside - 2 * LETTERS) / columns - LETTERS


def _cell(axis: Any, column: int, place: int, text: str, color: str) -> None:
    cell = axis.text(column, place, text, color=color, fontsize=7, ha="center", va="center")
    cell.set_in_layout(False)  # it is within the panel, and there are hundreds


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("weights", ["#f4f7fa", style.COLOURS[0]])


def _legend(figure: Figure, handles: Sequence[Any], words: Sequence[str]) -> None:
    """A few short words below the panel, which fit into one line."""
    figure.legend(
        handles,
        words,
        loc="outside lower center",
        ncols=len(words),
        fontsize=style.SMALL,
        frameon=False,
        handlelength=1.6,
        handletextpad=lines.PAD,
        columnspacing=lines.GAP,
    )
