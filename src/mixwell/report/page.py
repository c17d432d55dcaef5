"""One self-contained HTML file: it opens offline, fits a phone, and prints."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from mixwell.report import style
from mixwell.utils import files
from mixwell.utils.bidi import isolate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY = "default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of pages: no script, no request, and no style but the page's own."""
MANY, TOP = 20, 12
"""A table with more rows is folded up, and its first rows are shown."""


@final
@dataclass(frozen=True)
class Picture:
    """A figure in a page.

    Args:
        source: a data URL.
        text: caption.
        alt: alternative text, by default the caption.
        photo: whether the colors are the content, so that a dark page must not invert them.
    """

    source: str
    text: str
    alt: str = ""
    photo: bool = False

    @classmethod
    def from_figure(cls, figure: Figure, text: str, *, alt: str = "") -> Picture:
        """Embed a figure as SVG."""
        style.settle(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None}, transparent=True)
        # No indents, and coordinates to a tenth of a point, which is finer than can be seen.
        small = re.sub(rb"\b([ML] -?\d+(?:\.\d)?)\d*( -?\d+(?:\.\d)?)\d*", rb"\1\2", drawn.getvalue())
        small = re.sub(rb"\s*\n\s*", b"\n", small)
        return cls("data:image/svg+xml;base64," + base64.b64encode(small).decode(), text, alt)

    @classmethod
    def from_panel(
        cls, draw: Callable[[Any], None], text: str, *, width: float = 4.6, height: float = 3.6
    ) -> Picture:
        """Embed a figure with one axis, which ``draw`` draws into."""
        figure, axes = style.new_figure(1, 1, width=width, height=height)
        draw(axes[0, 0])
        return cls.from_figure(figure, text)

    @classmethod
    def from_png(cls, path: Path, text: str) -> Picture:
        """Embed a PNG file."""
        return cls("data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(), text, photo=True)


@final
@dataclass(frozen=True)
class DataTable:
    """A table in a page.

    Args:
        text: caption.
        shades: of the cells after the first in each row, from 0 to 1; empty for none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    shades: Sequence[Sequence[float]] = ()

    @property
    def top(self) -> int:
        """Number of rows that are shown until a reader unfolds the table; 0 for all."""
        return TOP if len(self.rows) > MANY else 0


@final
@dataclass(frozen=True)
class PageSection:
    """A section of a page: paragraphs, then pictures and tables in a grid.

    Args:
        columns: maximum number of columns of the grid: 1, 2 or 3.
        blocks: titles and preformatted texts, folded up.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[DataTable] = ()
    columns: int = 3
    blocks: Sequence[tuple[str, str]] = ()


@final
@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        lead: the result in a few sentences.
        facts: names and values that describe the environment.
    """

    title: str
    lead: Sequence[str]
    sections: Sequence[PageSection]
    facts: Sequence[tuple[str, str]] = field(default=())


def write_page(page: Page, path: Path) -> Path:
    """Write a page; all its text is escaped.

    Raises:
        ValueError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ValueError("the HTML report needs jinja2: pip install 'mixwell[report]'") from error
    from markupsafe import Markup

    templates = Environment(
        loader=PackageLoader("mixwell.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_isolated,
    )
    style = templates.get_template("page.css").render().strip()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Our own constants, so that nothing in them needs an escape, which would change the hash.
    given = {"style": Markup(style), "policy": Markup(POLICY.format(digest=digest))}
    files.write_atomically(path, templates.get_template("page.html").render(page=page, **given) + "\n")
    return path


def _isolated(value: Any) -> Any:
    """Return a text of a page with its bidirectional control characters closed; what is markup stays."""
    return isolate(value) if type(value) is str else value
