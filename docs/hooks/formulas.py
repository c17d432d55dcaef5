"""Renders formulas as inline SVG, without fonts, scripts or a server.

``$...$`` is an inline formula; each line of a fenced ``math`` block is a displayed formula. matplotlib parses the
TeX, and the glyphs become one SVG path in the color of the text.
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

# Units of the outline per em. Computer Modern glyphs are smaller than those of the surrounding text.
_UNITS = 100.0
_ENLARGED = 1.12
_MARGIN = 3.0
_LETTERS = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}


@cache
def svg(formula: str) -> str:
    """Return a formula as an SVG element on the baseline of the surrounding text, in its color and size.

    Args:
        formula: TeX, in the subset of matplotlib's mathtext.

    Raises:
        ValueError: matplotlib cannot parse the formula; the message shows where.
    """
    letters = FontProperties(math_fontfamily="cm")
    outline = TextPath((0, 0), f"${formula}$", size=_UNITS, prop=letters)
    box = outline.get_extents()
    left, top = min(box.x0, 0.0) - _MARGIN, -box.y1 - _MARGIN  # keep leading space
    width, height = box.x1 - left + _MARGIN, box.height + 2 * _MARGIN
    below = -(box.y0 - _MARGIN)
    # The y axis of SVG points down.
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
        # Keep punctuation after a formula on the same line.
        drawn = svg(m[1]) if not m[2] else f'<span class="formula-end">{svg(m[1])}{m[2]}</span>'
        return self.md.htmlStash.store(drawn), m.start(0), m.end(0)


class Formulas(Extension):
    """Adds inline formulas to Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the inline pattern."""
        # After code spans, which can contain dollars, and before the patterns for _ and *.
        pattern = r"(?<![\\$\w])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])([.,;:)]*)"
        md.inlinePatterns.register(_Inline(pattern, md), "formula", 185)


def fence(source: str, language: str, css: str, options: dict[str, str], md: Markdown, **more: Any) -> str:
    """Return the HTML of a fenced block of formulas, one per line; the signature is that of superfences."""
    rows = "".join(f"<div>{svg(line.strip())}</div>" for line in source.splitlines() if line.strip())
    return f'<div class="formulas" tabindex="0">{rows}</div>'
