"""The look of our figures."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Four and seven have no common divisor, so that color and dashes together tell 28 lines apart; colors that are
# near each other for some readers (blue and green, red and orange) have different dashes.
DASHES = ("-", (0, (4, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1)))
MARKERS = ("o", "s", "^", "D", "v")
INK, FAINT = "#222222", "#bbbbbb"
PANEL = 4.0
"""Inches. A picture of this width has letters that can be read on a phone, where it is as wide as the screen."""
SMALL = 8.5
"""Points: the letters of legends."""


@final
@dataclass(frozen=True)
class Look:
    """How a line is drawn.

    Args:
        color: of the line.
        dashes: as matplotlib has them.
        marker: where there are few points.
    """

    color: str
    dashes: Any
    marker: str


def looks(count: int) -> list[Look]:
    """Lines that can be told apart, also by readers who see fewer colors, and also without colors.

    Args:
        count: how many.

    Returns:
        As many; no two are the same up to 28.
    """
    return [
        Look(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i in range(count)
    ]


def new_figure(
    rows: int, columns: int, *, width: float = 10.0, height: float = 3.4, below: float = 0.0
) -> tuple[Figure, Any]:
    """A figure with plain axes.

    Args:
        rows: of axes.
        columns: of axes.
        width: of the figure in inches.
        height: of a row in inches.
        below: more inches below all rows, such as for a legend.

    Returns:
        The figure and its axes, always as a two-dimensional array.

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
    figure = Figure(figsize=(width, height * rows + below), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=INK, labelsize=9)
        axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def plain(text: str) -> str:
    """A text that matplotlib shows as it is: no formulas, and no names that it hides.

    Args:
        text: such as a domain's name.

    Returns:
        The text for matplotlib.
    """
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


@cache
def text_width(text: str, size: float) -> float:
    """How wide a text is.

    Args:
        text: one line.
        size: of its letters, in points.

    Returns:
        Points.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0])


def short(text: str, size: float, room: float) -> str:
    """A text that fits: where it is too long its middle is left out, since names often differ in their ends.

    Args:
        text: one line.
        size: of its letters, in points.
        room: points.

    Returns:
        The text, or its ends.
    """

    def ends(keep: int) -> str:
        return f"{text[: keep - keep // 2]}…{text[len(text) - keep // 2 :]}"

    if text_width(text, size) <= room:
        return text
    lengths = range(4, len(text))
    fitting = bisect_right(lengths, room, key=lambda keep: text_width(ends(keep), size))
    return ends(lengths[max(fitting - 1, 0)])


def count_axis(axis: Any) -> None:
    """Short numbers on an axis that counts: 250, 20k, 3M.

    Args:
        axis: matplotlib's ``axis.xaxis`` or ``axis.yaxis``.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=True))


def log_axis(axis: Any, label: str) -> None:
    """A logarithmic axis from left to right, with plain numbers.

    Args:
        axis: of the figure.
        label: what it shows.
    """
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(label, fontsize=9)


def settle(figure: Figure) -> None:
    """Put everything into its place, once; otherwise every file would take twice the time.

    Args:
        figure: nothing is added to it after this.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG.

    Args:
        figure: the figure.
        path: without ending.

    Returns:
        The two files.
    """
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    settle(figure)
    figure.savefig(written[0], dpi=150)
    figure.savefig(written[1], metadata={"Date": None})
    return written
