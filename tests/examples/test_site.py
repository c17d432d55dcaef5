"""The documentation is built, whole, with nothing dead in it, and needs nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

import mixwell
from helpers.chromium import opened
from helpers.commands import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the workers of one test session share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "site.lock"):
        if not (shared / "site" / "index.html").exists():
            build(shared / "site")
    return shared / "site"


def build(out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------- links


@dataclass
class Page(HTMLParser):
    """What a page has and what it refers to."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    """What a browser loads by itself: scripts, styles, fonts, pictures, frames."""
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag in ("a", "area"):
            self.links += [given["href"]] if "href" in given else []
        else:
            self.resources += [given[name] for name in ("src", "href", "data", "poster") if name in given]
            self.resources += [one.split()[0] for one in given.get("srcset", "").split(",") if one.strip()]
        self.resources += outside_in_css(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def outside_in_css(css: str) -> list[str]:
    """What a style sheet loads from elsewhere."""
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)", css) + re.findall(r"@import\s+['\"]([^'\"]+)", css)
    return [one for one in found if urlsplit(one).netloc]


def trouble(site: Path) -> list[str]:
    """Every dead link, anchor and picture of a site, and whatever it loads from elsewhere."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    found: list[str] = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in page.links:
            if not urlsplit(link).scheme and (problem := dead(link, path, site, pages)):
                found.append(f"{where}: {problem}")
        for resource in page.resources:
            address = urlsplit(resource)
            if address.netloc or address.scheme not in ("", "data"):
                found.append(f"{where}: loads {resource} from elsewhere")
            elif not address.scheme and (problem := dead(resource, path, site, pages)):
                found.append(f"{where}: {problem}")
    for path in site.rglob("*.css"):
        css = outside_in_css(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: loads {one} from elsewhere" for one in css]
    return found


def dead(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    address = urlsplit(link)
    target = path
    if address.path:
        # Only the page that a server gives for an unknown address has to begin at the root.
        if address.path.startswith("/") and path.name != "404.html":
            return f"{link} begins at the root of a server"
        start = site if address.path.startswith("/") else path.parent
        target = (start / unquote(address.path).lstrip("/")).resolve()
        target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return f"{link} leads to a file that is not there"
    anchor = unquote(address.fragment)
    if anchor and target in pages and anchor not in pages[target].ids:
        return f"{link} leads to an anchor that is not there"
    return None


def test_no_dead_links_and_no_external_resources(site: Path) -> None:
    assert trouble(site) == []


def test_broken_pages_are_detected(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1>')
    whole = '<a href="other.html#here">x</a><a href="https://example.org">y</a><img src="picture.png">'
    (tmp_path / "whole.html").write_text(whole + '<a href="#top"></a><p id="top" style="width:1em">z</p>')
    assert trouble(tmp_path.resolve()) == []
    broken = {
        '<a href="no.html">x</a>': "no.html leads to a file that is not there",
        '<a href="other.html#there">x</a>': "other.html#there leads to an anchor that is not there",
        '<a href="#nowhere">x</a>': "#nowhere leads to an anchor that is not there",
        '<a href="/other.html">x</a>': "/other.html begins at the root of a server",
        '<img src="no.png">': "no.png leads to a file that is not there",
        '<script src="https://cdn.example/x.js"></script>': "loads https://cdn.example/x.js from elsewhere",
        '<link rel="stylesheet" href="//cdn.example/x.css">': "loads //cdn.example/x.css from elsewhere",
        '<p style="background: url(https://cdn.example/x.png)">': "loads https://cdn.example/x.png from elsewhere",
    }
    for html, problem in broken.items():
        (tmp_path / "broken.html").write_text(html)
        assert trouble(tmp_path.resolve()) == [f"broken.html: {problem}"]
    (tmp_path / "broken.html").unlink()
    (tmp_path / "x.css").write_text('@import "https://fonts.example/a.css";')
    assert trouble(tmp_path.resolve()) == ["x.css: loads https://fonts.example/a.css from elsewhere"]


# -------------------------------------------------------------------------------------------------- names


def missing(names: Iterable[str], pages: Iterable[Page]) -> list[str]:
    """The public names for which there is no anchor."""
    anchors = {anchor for page in pages for anchor in page.ids}
    return sorted(name for name in names if f"mixwell.{name}" not in anchors)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = [read(path) for path in (site / "reference").glob("*.html")]
    assert missing(mixwell.__all__, pages) == [], "add `::: mixwell.NAME` to a page of docs/reference"
    assert missing(["Mixer", "Nobody"], pages) == ["Nobody"]


def undocumented(names: Iterable[str], module: Any) -> list[str]:
    """The classes and functions without a docstring of their own (a dataclass makes one of its signature)."""
    texts = {name: getattr(module, name).__doc__ or "" for name in names if not name.startswith("__")}
    return [name for name, text in texts.items() if not text.strip() or text.startswith(f"{name}(")]


def test_every_public_name_has_a_docstring() -> None:
    @dataclass
    class Bare:
        number: int

    assert undocumented(mixwell.__all__, mixwell) == []
    assert undocumented(["Bare"], type("module", (), {"Bare": Bare})) == ["Bare"]


def test_generated_content_is_present(site: Path) -> None:
    told = {name: read(site / "reference" / f"{name}.html") for name in ("command-line", "config")}
    assert {"mixwell-run", "mixwell-reproduce-mnist"} <= told["command-line"].ids
    text = " ".join("".join(told["config"].text).split())
    for words in (
        "max_epochs",
        "T, training steps per weight update",
        "default null",
        "Rank of projected traces",
    ):
        assert words in text
    everything = " ".join(
        " ".join(read(path).text) for path in site.rglob("*.html") if "assets" not in path.parts
    )
    for left_over in (":class:`", ":meth:`", "<!-- settings", "::: mixwell", "```"):
        assert left_over not in everything


# -------------------------------------------------------------------------------------------------- hooks


def hook(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formulas_become_svg() -> None:
    formulas = hook("formulas")
    drawn = formulas.svg(r"\dfrac{w_j}{2} \leq \sqrt{N}")
    assert drawn.count("<path") == 1
    assert r'aria-label="\dfrac{w_j}{2} \leq \sqrt{N}"' in drawn
    import markdown

    made = markdown.markdown("It is $T_k$, not `$HOME` or $5 and $6.", extensions=[formulas.Formulas()])
    assert made.count("<svg") == 1
    assert "<code>$HOME</code> or $5 and $6." in made
    with pytest.raises(ValueError, match="nosuch"):
        formulas.svg(r"\nosuch{x}")


def test_docstrings_become_markdown() -> None:
    read_as = hook("docstrings").markdown
    assert read_as(":class:`mixwell.Mixer` is") == (
        '<autoref optional identifier="mixwell.Mixer"><code>Mixer</code></autoref> is'
    )
    assert read_as("Do this::\n\n    x = 1\n\n    y = 2\n\nThen.") == (
        "Do this:\n\n```python\nx = 1\n\ny = 2\n```\n\nThen."
    )
    assert read_as("So:\n\n    ``a``,  ``b``\n\nand") == "So:\n\n```text\na,  b\n```\n\nand"
    kept = "One.\n\nArgs:\n    x: one\n\n        more\n\nExample:\n    >>> 1\n    1\n"
    assert read_as(kept) == kept.replace("Example:", "Examples:")


# ------------------------------------------------------------------------------------------------ browser


@pytest.mark.parametrize("width", [360, 1280])
def test_pages_fit_screen_without_external_requests(browser: Any, site: Path, width: int) -> None:
    tab, noted = opened(browser, site / "index.html", width)
    for path in sorted(site.rglob("*.html")):
        if "assets" in path.parts or path.name == "404.html":
            continue
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path
        assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), path
    assert noted == []
    tab.context.close()


def test_search_works_from_the_file_system(browser: Any, site: Path) -> None:
    tab, noted = opened(browser, site / "index.html", 1280)
    tab.locator("input.md-search__input").click()
    tab.keyboard.type("projected traces")
    tab.locator(".md-search-result__item a").first.wait_for(timeout=1000 * PATIENCE)
    assert "traces" in tab.locator(".md-search-result__list").inner_text().lower()
    assert noted == []
    tab.context.close()
