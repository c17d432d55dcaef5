"""The style of our figures: line styles, axes, legends, and lines with few points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from mixwell.typing import Vector
from mixwell.utils.bidi import without_controls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Four and seven have no common divisor, so that color and dashes together give 28 distinct lines; colors that are
# similar for some readers (blue and green, red and orange) have different dashes.
DASHES = ("-", (0, (4, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1)))
MARKERS = ("o", "s", "^", "D", "v")
INK, GRAY, FAINT = "#222222", "#777777", "#bbbbbb"
PANEL = 4.0
"""Width of a panel in inches: its text is readable on a phone, where it fills the screen."""
SMALL = 8.5
"""Font size of legends, in points."""
CHARACTERS = 13.5
"""Characters of a legend per inch, about."""
NAMED = 6
POINTS, FAINT_POINTS = 120, 40
EARLY = 0.1
Points = tuple[Vector, Vector]
"""x and y of a line."""


@final
@dataclass(frozen=True)
class LineStyle:
    """Color, dashes (as in matplotlib) and marker of a line."""

    color: str
    dashes: Any
    marker: str


LineStyles = Mapping[str, LineStyle]
"""Styles of the named lines; others are faint."""


def line_styles(count: int) -> list[LineStyle]:
    """Return styles that can be distinguished also by color-blind readers; distinct up to 28."""
    return [
        LineStyle(COLORS[i % len(COLORS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i in range(count)
    ]


def style_largest(weights: Mapping[str, float]) -> LineStyles:
    """Return styles of all names, or of those with the largest weights if there are more names than colors."""
    names = list(weights)
    if len(names) > len(COLORS):
        names = sorted(names, key=weights.__getitem__, reverse=True)[:NAMED]
    return dict(zip(names, line_styles(len(names)), strict=True))


def new_figure(rows: int, columns: int, *, width: float = 10.0, height: float = 3.4) -> tuple[Figure, Any]:
    """Return a figure with plain axes, which are always a two-dimensional array.

    Args:
        width: width of the figure in inches.
        height: height of a row in inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "figures need matplotlib: pip install 'mixwell[report]' (or ask for no figures)"
        ) from error
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "mixwell"  # so that the same data give the same file
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=9)
        axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def label(text: str, length: int = 40) -> str:
    """Return a text for matplotlib: literal, and without its middle if it is longer than ``length`` characters.

    Example:
        >>> label("stackexchange-mathematics-answers", 16)
        'stackexc…answers'
    """
    text = without_controls(text)
    if len(text) > length:
        text = f"{text[: length // 2]}…{text[len(text) - (length - 1) // 2 :]}"
    # A leading underscore would hide the text in a legend, and dollars would start a formula.
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def legend(figure: Figure, styles: LineStyles, *, others: int = 0, markers: bool = False) -> None:
    """Add a legend of lines below the panels, and make the figure higher by its height.

    Args:
        others: number of faint lines.
        markers: whether the lines have markers.
    """
    from matplotlib.lines import Line2D

    handles = {
        name: Line2D([], [], color=s.color, ls=s.dashes, lw=1.7, marker=s.marker if markers else "", ms=4)
        for name, s in styles.items()
    }
    if others:
        handles[f"{others} others"] = Line2D([], [], color=FAINT, lw=0.7)
    legend_below(figure, handles)


def legend_below(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Add a legend of handles by label below the panels, and make the figure higher by its height."""
    if not handles:
        return
    columns = _columns(list(handles), figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + -(-len(handles) // columns) * 1.5 * SMALL / 72)
    figure.legend(
        list(handles.values()),
        [label(name) for name in handles],
        loc="outside lower center",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        columnspacing=1.5,
    )


def legend_under(axis: Any) -> None:
    """Add a legend of an axis' own lines below it, for an axis about as wide as :data:`PANEL`."""
    labels = axis.get_legend_handles_labels()[1]
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=4.0,  # in font sizes: below the tick labels and the axis label
        ncols=_columns(labels, PANEL),
        fontsize=8,
        frameon=False,
        columnspacing=1.5,
    )


def draw_lines(
    axis: Any, styles: LineStyles, lines: Mapping[str, Points], *, steps: bool = False, marked: bool = False
) -> None:
    """Draw lines by name, those with a style above the faint others.

    Args:
        steps: whether a value holds until the next one.
        marked: whether named lines have some markers, at different positions.
    """
    shape = "steps-post" if steps else "default"
    others = [points for name, points in lines.items() if name not in styles]
    if others:  # one path with gaps: it is drawn much faster than many
        gap = np.array([np.nan])
        x, y = (np.concatenate([part for one in others for part in (one[i], gap)]) for i in (0, 1))
        axis.plot(x, y, color=FAINT, lw=0.7, drawstyle=shape, zorder=1.5)
    # Dashed above solid lines, so that coinciding lines can be seen.
    for name, own in sorted(styles.items(), key=lambda item: DASHES.index(item[1].dashes)):
        if name in lines:
            every = max(1, len(lines[name][0]) // 8)
            start = list(styles).index(name) % every
            marks = {"marker": own.marker, "ms": 4, "markevery": (start, every)} if marked else {}
            axis.plot(*lines[name], color=own.color, ls=own.dashes, lw=1.7, drawstyle=shape, **marks)


def thin(x: Sequence[float], y: Sequence[float | None], *, mean: bool = False, named: bool = True) -> Points:
    """Return a line with at most 120 points (40 if it is not named), so that pages stay small.

    Args:
        y: ``None`` where the value is unknown.
        mean: whether a point is the mean of those omitted before it. The last point is always kept.
    """
    across, up = np.array(x, dtype=float), np.array([np.nan if v is None else v for v in y], dtype=float)
    most = POINTS if named else FAINT_POINTS
    if len(across) <= most:
        return across, up
    kept = np.linspace(0, len(across) - 1, most).round().astype(int)
    if not mean:
        return across[kept], up[kept]
    starts = np.concatenate([[0], kept[:-1] + 1])
    known = np.add.reduceat(np.isfinite(up).astype(float), starts)
    sums = np.add.reduceat(np.nan_to_num(up), starts)
    return across[kept], np.divide(sums, known, out=np.full(len(kept), np.nan), where=known > 0)


def late_limits(lines: Sequence[Points], end: float, *, early: float = EARLY) -> tuple[float, float] | None:
    """Return limits of a loss axis without the initial drop, which would hide all differences.

    Args:
        end: the last x.
        early: the fraction of it that is left out.

    Returns:
        Minimum and maximum after it, with a margin; ``None`` (no limits) with fewer than four points.
    """
    late = [y[(x > early * end) & np.isfinite(y)] for x, y in lines]
    if max((len(one) for one in late), default=0) < 4:
        return None
    values = np.concatenate(late)
    margin = 0.05 * float(values.max() - values.min()) or 0.05 * abs(float(values[0])) or 1.0
    return float(values.min()) - margin, float(values.max()) + margin


def count_axis(axis: Any) -> None:
    """Format ``axis.xaxis`` or ``axis.yaxis`` with short counts: 250, 20k, 3M."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=True))


def log_axis(axis: Any, text: str) -> None:
    """Make the x axis logarithmic, with plain numbers and this label."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(text, fontsize=9)


def settle(figure: Figure) -> None:
    """Lay out a finished figure once; otherwise every format would take that time again."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG to ``path`` with these suffixes."""
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    settle(figure)
    for one in written:
        one.unlink(missing_ok=True)  # a link there would be followed
    figure.savefig(written[0], dpi=150)
    figure.savefig(written[1], metadata={"Date": None})
    return written


def _columns(labels: Sequence[str], width: float) -> int:
    """Return the number of legend columns; a handle is about as wide as six characters."""
    longest = max(len(label(one)) for one in labels) + 6
    return max(1, min(len(labels), int(CHARACTERS * width / longest)))
