"""The look of our figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT = "#222222", "#bbbbbb"


def new_figure(rows: int, columns: int, *, width: float = 10.0, height: float = 3.4) -> tuple[Figure, Any]:
    """A figure with plain axes.

    Args:
        rows: of axes.
        columns: of axes.
        width: of the figure in inches.
        height: of a row in inches.

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
    figure = Figure(figsize=(width, height * rows), layout="constrained")
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


def colours(count: int) -> list[str]:
    """Colours that can be told apart.

    Args:
        count: how many.

    Returns:
        As many.
    """
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps, colors

    return [colors.to_hex(colormaps["turbo"](0.05 + 0.9 * i / (count - 1))) for i in range(count)]


def log_axis(axis: Any, label: str) -> None:
    """A logarithmic axis from left to right, with plain numbers.

    Args:
        axis: of the figure.
        label: what it shows.
    """
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(label, fontsize=9)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG.

    Args:
        figure: the figure.
        path: without ending.

    Returns:
        The two files.
    """
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(written[0], dpi=150)
    figure.savefig(written[1], metadata={"Date": None})
    return written
