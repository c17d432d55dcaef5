"""Formulas as pictures that are part of the page: no font, no script and no server draws them.

``$...$`` is a formula in a line, a block that is fenced as ``math`` one of its own (several lines stand below each
other). Both are read as TeX by matplotlib, whose glyphs become one SVG path in the color of the text.
"""

from __future__ import annotations

import html
from functools import cache
from typing import Any

from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath

# Units of the outline per em. The letters of Computer Modern are smaller than those of the text around them.
_UNITS = 100.0
_ENLARGED = 1.12
_MARGIN = 3.0
_LETTERS = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}


@cache
def svg(formula: str) -> str:
    """A formula as an SVG element.

    Args:
        formula: TeX, as far as matplotlib's mathtext has it.

    Returns:
        The element. It stands on the base line of the text around it, in its color and size.

    Raises:
        ValueError: matplotlib cannot read the formula; the message shows where.
    """
    letters = FontProperties(math_fontfamily="cm")
    outline = TextPath((0, 0), f"${formula}$", size=_UNITS, prop=letters)
    box = outline.get_extents()
    left, top = min(box.x0, 0.0) - _MARGIN, -box.y1 - _MARGIN  # space in front of it stays
    width, height = box.x1 - left + _MARGIN, box.height + 2 * _MARGIN
    below = -(box.y0 - _MARGIN)
    # SVG counts downwards.
    drawn = "".join(
        "Z" if code == Outline.CLOSEPOLY else _LETTERS[code] + _numbers(points)
        for points, code in outline.iter_segments(simplify=False, curves=True)
    )
    em = _ENLARGED / _UNITS
    return (
        f'<svg class="formula" role="img" aria-label="{html.escape(formula)}" '
        f'viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" '
        f'style="width:{width * em:.3f}em;height:{height * em:.3f}em;vertical-align:{-below * em:.3f}em">'
        f'<path fill="currentColor" d="{drawn}"/></svg>'
    )


def _numbers(points: Any) -> str:
    return " ".join(f"{x:.0f} {-y:.0f}" for x, y in points.reshape(-1, 2))


class _Inline(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:  # noqa: N802
        # A line must not begin with the full stop that ends a formula.
        drawn = svg(m[1]) if not m[2] else f'<span class="formula-end">{svg(m[1])}{m[2]}</span>'
        return self.md.htmlStash.store(drawn), m.start(0), m.end(0)


class Formulas(Extension):
    """Reads formulas in Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Teach a converter to read them.

        Args:
            md: the converter.
        """
        # After code in backticks, which may have dollars, and before everything that reads _ and *.
        pattern = r"(?<![\\$\w])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])([.,;:)]*)"
        md.inlinePatterns.register(_Inline(pattern, md), "formula", 185)


def fence(source: str, language: str, css: str, options: dict[str, str], md: Markdown, **more: Any) -> str:
    """A fenced block of formulas, one on each line.

    Args:
        source: the block.
        language: not used.
        css: not used.
        options: not used.
        md: not used.
        more: not used.

    Returns:
        HTML.
    """
    rows = "".join(f"<div>{svg(line.strip())}</div>" for line in source.splitlines() if line.strip())
    return f'<div class="formulas" tabindex="0">{rows}</div>'
