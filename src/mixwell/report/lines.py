"""Lines of domains or runs in panels: those that can be told apart, the others in grey, and a legend that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mixwell.report import style
from mixwell.report.style import Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]
Course = tuple[Numbers, Numbers]
"""Where the points of a line are: from left to right, and how high."""
Looks = Mapping[str, Look]
"""Lines that are named; what is not in it is grey."""

NAMED = 6
POINTS, GREY_POINTS = 120, 40
MARKED = 8
FEW_POINTS = 4
"""Of a curve with fewer of them the first fall is shown too."""
EARLY = 0.1
HANDLE, PAD, GAP = 2.8, 0.6, 1.5  # of a legend, in letters


def chosen(weights: Mapping[str, float]) -> Looks:
    """The domains whose lines are named: all of them, or the greatest where there are more than colors.

    Args:
        weights: by name; what a reader looks for first has the greatest.

    Returns:
        How they look, in the order of the legend.
    """
    names = list(weights)
    if len(names) > len(style.COLOURS):
        names = sorted(names, key=weights.__getitem__, reverse=True)[:NAMED]
    return dict(zip(names, style.looks(len(names)), strict=True))


def draw(
    axis: Any, looks: Looks, courses: Mapping[str, Course], *, steps: bool = False, marked: bool = False
) -> None:
    """Draw a line for each domain, the named ones above the others.

    Args:
        axis: of the figure.
        looks: of those that are named.
        courses: by name.
        steps: whether values stay until the next one.
        marked: whether named lines have some markers, at other places in each.
    """
    shape = "steps-post" if steps else "default"
    others = [course for name, course in courses.items() if name not in looks]
    if others:  # one path with gaps: it is drawn much faster than many
        gap = np.array([np.nan])
        across, up = (np.concatenate([part for c in others for part in (c[i], gap)]) for i in (0, 1))
        axis.plot(across, up, color=style.FAINT, lw=0.7, drawstyle=shape, zorder=1.5)
    # Dashes above whole lines, so that lines in the same place are seen all.
    for name, look in sorted(looks.items(), key=lambda item: style.DASHES.index(item[1].dashes)):
        if name in courses:
            every = max(1, len(courses[name][0]) // MARKED)
            begin = list(looks).index(name) % every
            marks = {"marker": look.marker, "ms": 4, "markevery": (begin, every)} if marked else {}
            axis.plot(*courses[name], color=look.color, ls=look.dashes, lw=1.7, drawstyle=shape, **marks)


def course(
    across: Sequence[float], up: Sequence[float | None], *, mean: bool = False, named: bool = True
) -> Course:
    """A line with no more points than can be seen, so that pages of many domains and long runs stay small.

    Args:
        across: where the points are, from left to right.
        up: how high; ``None`` where that is not known.
        mean: whether a point stands for the mean of those that are left out before it, or for itself alone.
        named: whether it will be named; others are grey and have fewer points.

    Returns:
        At most 120 points, or 40, and the last one is among them.
    """
    x, y = np.array(across, dtype=float), np.array([np.nan if v is None else v for v in up], dtype=float)
    most = POINTS if named else GREY_POINTS
    if len(x) <= most:
        return x, y
    kept = np.linspace(0, len(x) - 1, most).round().astype(int)
    if mean:
        starts = np.concatenate([[0], kept[:-1] + 1])
        known = np.add.reduceat(np.isfinite(y).astype(float), starts)
        sums = np.add.reduceat(np.nan_to_num(y), starts)
        return x[kept], np.divide(sums, known, out=np.full(len(kept), np.nan), where=known > 0)
    return x[kept], y[kept]


def late_limits(courses: Sequence[Course], end: float) -> tuple[float, float] | None:
    """Limits of a loss without its first fall, beside which nothing else could be seen.

    Args:
        courses: losses.
        end: the last step.

    Returns:
        The least and the greatest after the first tenth, with some room; ``None``, for all, where too few points
        are there to see a course.
    """
    late = [y[(x > EARLY * end) & np.isfinite(y)] for x, y in courses]
    if max((len(one) for one in late), default=0) < FEW_POINTS:
        return None
    values = np.concatenate(late)
    room = 0.05 * float(values.max() - values.min()) or 0.05 * abs(float(values[0])) or 1.0
    return float(values.min()) - room, float(values.max()) + room


def weight_limit(courses: Mapping[str, Course]) -> float:
    """How high an axis of weights goes: to one, or less where no weight comes near it.

    Args:
        courses: of weights, by domain.

    Returns:
        The limit.
    """
    greatest = max(float(up.max()) for _, up in courses.values())
    return 1.02 if greatest > 0.5 else 1.1 * greatest


def legend_rows(labels: Sequence[str], width: float) -> tuple[int, int]:
    """How a legend is laid out.

    Args:
        labels: its words.
        width: of the figure in inches.

    Returns:
        Rows and columns.
    """
    room = 72 * width - 2 * style.SMALL
    widths = [_entry(label, room) for label in labels]
    for columns in range(len(labels), 1, -1):
        # Matplotlib fills column after column in the same way.
        total = sum(part.max() for part in np.array_split(np.array(widths), columns))
        if total + GAP * style.SMALL * (columns - 1) <= room:
            return -(-len(labels) // columns), columns
    return len(labels), 1


def legend(figure: Figure, looks: Looks, *, others: int = 0, markers: bool = False) -> None:
    """A legend below the panels, where it covers nothing.

    Args:
        figure: with room for :func:`legend_height`.
        looks: what is in it.
        others: how many lines are grey.
        markers: whether the lines have markers.
    """
    from matplotlib.lines import Line2D

    labels = legend_labels(looks, others=others)
    if not labels:
        return
    width = float(figure.get_figwidth())
    handles = [
        Line2D([], [], color=look.color, ls=look.dashes, lw=1.7, marker=look.marker if markers else "", ms=4)
        for look in looks.values()
    ]
    if others:
        handles.append(Line2D([], [], color=style.FAINT, lw=0.7))
    room = 72 * width - (2 + HANDLE + PAD) * style.SMALL
    figure.legend(
        handles,
        [style.plain(style.short(label, style.SMALL, room)) for label in labels],
        loc="outside lower center",
        ncols=legend_rows(labels, width)[1],
        fontsize=style.SMALL,
        frameon=False,
        handlelength=HANDLE,
        handletextpad=PAD,
        columnspacing=GAP,
    )


def legend_under(axis: Any) -> None:
    """A legend of an axis' own lines below it.

    Args:
        axis: one of a width of about :data:`mixwell.report.style.PANEL`.
    """
    labels = axis.get_legend_handles_labels()[1]
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=4.0,  # letters: below the numbers and the name of the axis
        ncols=legend_rows(labels, style.PANEL)[1],
        fontsize=8,
        frameon=False,
        columnspacing=GAP,
    )


def legend_labels(looks: Looks, *, others: int = 0) -> list[str]:
    """The words of a legend.

    Args:
        looks: the named lines.
        others: how many lines are grey.

    Returns:
        The names, and how many others there are.
    """
    return [*looks, *([f"{others} others"] if others else [])]


def legend_height(labels: Sequence[str], width: float) -> float:
    """The room that a legend needs below the panels.

    Args:
        labels: its words.
        width: of the figure in inches.

    Returns:
        Inches.
    """
    return legend_rows(labels, width)[0] * 1.5 * style.SMALL / 72 if labels else 0.0


def _entry(label: str, room: float) -> float:
    """How wide a label is with its line."""
    return min(style.text_width(label, style.SMALL) + (HANDLE + PAD) * style.SMALL, room)
