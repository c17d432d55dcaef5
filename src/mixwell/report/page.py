"""One HTML file that needs nothing else: it opens offline, fits a phone, and prints."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

from mixwell.report import style
from mixwell.utils import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True)
class Picture:
    """A figure in a page.

    Args:
        source: a data address.
        text: what it shows, below it.
        alt: the same and more in words, for those who cannot see it; by default the text.
    """

    source: str
    text: str
    alt: str = ""

    @classmethod
    def of(cls, figure: Figure, text: str, *, alt: str = "") -> Picture:
        """A picture of a figure, as SVG.

        Args:
            figure: of matplotlib.
            text: what it shows.
            alt: what can be seen in it.

        Returns:
            The picture.
        """
        style.settle(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        return cls(
            "data:image/svg+xml;base64," + base64.b64encode(_small(drawn.getvalue())).decode(), text, alt
        )

    @classmethod
    def of_png(cls, path: Path, text: str) -> Picture:
        """A picture of a PNG file.

        Args:
            path: of the file.
            text: what it shows.

        Returns:
            The picture.
        """
        return cls("data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(), text)


@final
@dataclass(frozen=True)
class Sheet:
    """A table in a page.

    Args:
        columns: their names.
        rows: texts.
        text: what it shows.
        shades: of the cells after the first in each row, from 0 to 1; none where there are none.
        top: so many rows are shown, and all of them when a reader unfolds the table; 0 for all.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    shades: Sequence[Sequence[float]] = ()
    top: int = 0


@final
@dataclass(frozen=True)
class Section:
    """A part of a page.

    Args:
        heading: of the part.
        paragraphs: of text.
        pictures: in a grid, beside each other where there is room.
        sheets: tables, in the same grid where they are narrow.
        columns: how many pictures stand beside each other at most: 1, 2 or 3.
        blocks: titles and texts that are shown as they are, folded up.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    sheets: Sequence[Sheet] = ()
    columns: int = 3
    blocks: Sequence[tuple[str, str]] = ()


@final
@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        title: of the page.
        lead: the result in a few sentences.
        sections: its parts.
        facts: of the environment, name and value.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = field(default=())


def _small(drawn: bytes) -> bytes:
    """An SVG without indents, and with lines to a tenth of a point, which is finer than can be seen."""
    drawn = re.sub(rb"\b([ML] -?\d+(?:\.\d)?)\d*( -?\d+(?:\.\d)?)\d*", rb"\1\2", drawn)
    return re.sub(rb"\s*\n\s*", b"\n", drawn)


def write(page: Page, path: Path) -> Path:
    """Write a page.

    Args:
        page: what is in it; all text is escaped.
        path: where to.

    Returns:
        The path.

    Raises:
        ValueError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ValueError("the HTML report needs jinja2: pip install 'mixwell[report]'") from error
    templates = Environment(
        loader=PackageLoader("mixwell.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    files.write_atomically(path, templates.get_template("page.html").render(page=page) + "\n")
    return path
