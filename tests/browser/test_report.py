"""The HTML reports in a real browser."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.chromium import opened
from helpers.report_runs import CHANGES, names, shared_folder, shared_runs
from helpers.text_configs import write_config
from mixwell.lab import tables
from mixwell.lab.compare import command
from mixwell.lab.mnist.experiment import DOMAINS, MnistResult, MnistSettings
from mixwell.lab.mnist.sweep import Results
from mixwell.report import compare, mnist, page, runs, style
from mixwell.report.page import DataTable, Page, PageSection
from mixwell.utils import environment
from mixwell.utils.bidi import isolate

# Pairs of texts of which one lies over the other. What a box that scrolls does not show is left out.
OVERLAPS = """
() => {
  const shown = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility()) continue;
    const box = parent.closest('.scroll, pre')?.getBoundingClientRect();
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      const [left, right] = box ? [Math.max(r.left, box.left), Math.min(r.right, box.right)] : [r.left, r.right];
      if (right > left) shown.push({node, left, right, top: r.top, bottom: r.bottom});
    }
  }
  for (const image of document.images) shown.push({node: image, ...image.getBoundingClientRect().toJSON()});
  const found = [];
  shown.sort((a, b) => a.top - b.top);
  shown.forEach((a, i) => {
    for (let j = i + 1; j < shown.length && shown[j].top < a.bottom - 1; j++) {
      const b = shown[j];
      if (a.node !== b.node && a.left < b.right - 1 && b.left < a.right - 1)
        found.push([a, b].map(one => one.node.textContent || one.node.alt));
    }
  });
  return found;
}
"""


LINES_OF_HEADS = """
() => [...document.querySelectorAll('th:first-child')].filter(head => head.checkVisibility()).map(head => {
  const range = document.createRange();
  range.selectNodeContents(head);
  return range.getClientRects().length;
})
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of made-up results: two budgets, two batch sizes, three seeds."""
    folder = tmp_path_factory.mktemp("results")
    results, random = Results(folder), np.random.default_rng(0)
    for budget in (1000, 5000):
        for batch_size in (32, 256):
            for horizon in (1, 5, 20, 84, 300, budget):
                for seed in range(3):
                    loss = 0.2 + abs(np.log(horizon / 60)) / 20 + random.normal() / 100
                    shares = random.dirichlet(np.ones(3))
                    weights = dict(zip(DOMAINS, shares.tolist(), strict=True))
                    course = [(step, weights) for step in range(0, budget + 1, budget // 10)]
                    outcome = MnistResult(loss, 1 - loss, loss, 1 - loss, weights, weights, course, 10.0)
                    results.add(MnistSettings(budget, horizon, seed, batch_size=batch_size), outcome)
    environment.write(folder)
    return mnist.write_report([folder], folder)[-1]


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("scripts", [True, False])
def test_report_fits_screen_without_external_requests(
    browser: Any, report: Path, width: int, scripts: bool
) -> None:
    tab, trouble = opened(browser, report, width, java_script_enabled=scripts)
    assert trouble == []
    images = tab.locator("img")
    assert images.count() == 2 * (3 + 1) + 4 * 6  # panels and valleys by budget, courses by curve
    for index in range(images.count()):
        box = images.nth(index).bounding_box()
        assert box["width"] >= min(250, width - 60)  # large enough to be read
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] > 100
        assert images.nth(index).get_attribute("alt")
    assert tab.locator("h1").bounding_box()["width"] <= width
    if scripts:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        # a table wider than a phone scrolls in its own box
        assert tab.evaluate(
            "[...document.querySelectorAll('.scroll')].every(d => d.clientWidth <= innerWidth)"
        )
    tab.context.close()


@pytest.fixture(scope="module")
def run_reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one run, of two runs, and of a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder)
    command.main(str(config), names=["mixwell", "uniform"], seeds=2, out=folder, workers=2)
    one, other = folder / "runs" / "mixwell-0", folder / "runs" / "uniform-1"
    return {
        "one run": runs.write_report([one], folder / "one")[-1],
        "two runs": runs.write_report([one, other], folder / "two")[-1],
        "comparison": compare.write_report(folder, folder / "comparison")[-1],
    }


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", ["one run", "two runs", "comparison"])
def test_run_reports_fit_screen(browser: Any, run_reports: dict[str, Path], name: str, width: int) -> None:
    tab, trouble = opened(browser, run_reports[name], width)
    assert trouble == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    images = tab.locator("img")
    assert images.count() >= 2
    for index in range(images.count()):
        box = images.nth(index).bounding_box()
        assert box["width"] >= min(250, width - 60)
        assert box["x"] + box["width"] <= width
        assert images.nth(index).get_attribute("alt")
    assert "letters" in tab.locator("body").inner_text()
    tab.context.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """The page of a number of domains and runs, made by the first process that asks for it."""

    def made(domains: int, count: int) -> Path:
        folders = shared_runs(tmp_path_factory, domains=domains)[:count]
        out, lock = shared_folder(tmp_path_factory, f"report-page-{domains}-{count}")
        with lock:
            if not out.exists():
                runs.write_report(folders, out)
        return out / "report.html"

    return made


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("domains", [3, 60])
def test_many_domains_and_runs_fit_screen(
    browser: Any, many: Callable[[int, int], Path], domains: int, count: int, width: int, scripts: bool
) -> None:
    path = many(domains, count)
    assert path.stat().st_size < 3e6
    tab, trouble = opened(browser, path, width, java_script_enabled=scripts)
    learned = sum("learned" in name for name, _ in CHANGES[:count])
    sizes = tab.evaluate(
        "[...document.images].map(i => [i.complete, i.naturalWidth, i.width, i.getBoundingClientRect().right])"
    )
    assert len(sizes) == 1 + 3 * count + learned
    for complete, natural, wide, right in sizes:
        assert complete
        assert natural > 0
        assert right <= width
        # An SVG of one inch has 96 pixels, in which a point is 4/3; smaller letters than this cannot be read.
        assert style.SMALL * 4 / 3 * wide / natural >= 9
    assert all(tab.evaluate("[...document.images].map(i => i.alt.length > 20)"))
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERLAPS) == []
    # Columns are wide enough for a word: the heads of the first ones stand in one line.
    assert set(tab.evaluate(LINES_OF_HEADS)) == {1}
    assert "stackexchange-mathematics-answers" in tab.content() or domains == 3
    if not scripts:  # pictures are there, not only their frames
        for index in (0, len(sizes) - 1):
            shot = Image.open(io.BytesIO(tab.locator("img").nth(index).screenshot()))
            assert len(shot.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 20
    # Everything unfolded: all domains are in the tables, and wide tables and long lines scroll in their own boxes.
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERLAPS) == []
    cells = set(tab.locator("td:first-child").all_inner_texts())
    assert set(names(domains)) <= cells
    assert trouble == []
    tab.context.close()


def test_report_of_many_runs_prints(browser: Any, many: Callable[[int, int], Path]) -> None:
    tab, _ = opened(browser, many(60, 8), 1280)
    printed = tab.pdf(format="A4")
    pages = printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ")
    assert 3 <= pages <= 9
    tab.context.close()


def test_report_prints(browser: Any, report: Path) -> None:
    tab, _ = opened(browser, report, 1280)
    printed = tab.pdf(format="A4")
    pages = printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ")
    assert 2 <= pages <= 9
    tab.context.close()


def test_text_is_escaped(browser: Any, tmp_path: Path) -> None:
    nasty = "<script>document.title='broken'</script> & <b>"
    made = Page(nasty, [nasty], [PageSection(nasty, [nasty], tables=[DataTable([nasty], [[nasty]], nasty)])])
    tab, trouble = opened(browser, page.write_page(made, tmp_path / "page.html"), 400)
    assert trouble == []
    assert tab.title() == nasty
    assert tab.locator("h1").inner_text() == nasty
    assert tab.locator("td").inner_text() == nasty
    tab.context.close()


def test_policy_stops_what_escaping_would_have_missed(
    browser: Any, run_reports: dict[str, Path], tmp_path: Path
) -> None:
    text = run_reports["one run"].read_text()
    assert "unsafe" not in text.partition("</head>")[0]
    evil = """<script>document.title='broken'</script><img src=x onerror="document.title='broken'">
    <style>h1 { color: rgb(1, 2, 3) }</style><h3 style="color: rgb(1, 2, 3)">x</h3>
    <img src="https://example.org/x.png"></main>"""
    path = tmp_path / "evil.html"
    path.write_text(text.replace("</main>", evil))
    tab, trouble = opened(browser, path, 400)
    assert tab.title().startswith("Run ")
    for name in ("h1", "h3"):
        assert tab.evaluate(f"getComputedStyle(document.querySelector('{name}')).color") != "rgb(1, 2, 3)"
    # Playwright lists a request that was stopped too; the browser says by what.
    stopped = [one for one in trouble if "Content Security Policy" in one]
    for what in ("example.org", "script-src", "style-src", "event handler"):
        assert any(what in one for one in stopped), what
    tab.context.close()


def test_names_that_change_direction_do_not_reorder_a_sentence(browser: Any, tmp_path: Path) -> None:
    """The positions on the screen of the words after a name, compared with those after a plain name."""
    ends: list[float] = []
    for name in ("abc", "\u202eabc", "\u2069\u202eabc", "\u2067abc"):
        lead = [f"{isolate(name)} has the lowest loss, 1.0 of 2.0."]
        made = page.write_page(Page("x", lead, []), tmp_path / "page.html")
        tab, _ = opened(browser, made, 1200)
        ends.append(
            tab.evaluate(
                """() => {
                  const node = document.querySelector('.lead p').firstChild, range = document.createRange();
                  const at = node.textContent.indexOf('lowest');
                  range.setStart(node, at);
                  range.setEnd(node, at + 6);
                  return range.getBoundingClientRect().left;
                }"""
            )
        )
        tab.context.close()
    assert ends == pytest.approx([ends[0]] * len(ends), abs=1)


def _luminance(color: str) -> float:
    """Relative luminance of WCAG 2 of ``rgb(r, g, b)``."""
    parts = [float(one) / 255 for one in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one run", "comparison"])
def test_text_and_figures_are_readable_in_both_color_schemes(
    browser: Any, run_reports: dict[str, Path], name: str, scheme: str
) -> None:
    tab, trouble = opened(browser, run_reports[name], 900, color_scheme=scheme)
    assert trouble == []
    style_of = "(s, k) => getComputedStyle(document.querySelector(s))[k]"
    paper = _luminance(tab.evaluate(f"({style_of})('body', 'backgroundColor')"))
    assert paper < 0.05 if scheme == "dark" else paper > 0.9
    for selector in ("p", "td", "th", "caption", "figcaption", "footer"):
        ink = _luminance(tab.evaluate(f"({style_of})('{selector}', 'color')"))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, selector
    # The corners of a figure are the page, and its text differs from it as much as the page's text does.
    shot = np.asarray(Image.open(io.BytesIO(tab.locator("img").first.screenshot())).convert("L"), dtype=float)
    assert abs(shot[0, 0] / 255 - (0.09 if scheme == "dark" else 1.0)) < 0.03
    assert np.abs(shot - shot[0, 0]).max() > 150
    tab.context.close()


def test_wide_table_scrolls_on_a_phone(browser: Any, tmp_path: Path) -> None:
    table = DataTable(
        ["method", *(f"column {i}" for i in range(9))], [["a", *["0.1234 [0.1, 0.2]"] * 9]], "wide"
    )
    made = page.write_page(Page("x", [], [PageSection("y", tables=[table])]), tmp_path / "page.html")
    tab, _ = opened(browser, made, 360, is_mobile=True, has_touch=True)
    box = "document.querySelector('.scroll')"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    left = tab.locator("td").first.bounding_box()["x"]
    tab.evaluate(f"{box}.scrollLeft = 300")
    last = tab.locator("td").nth(3).bounding_box()
    assert tab.evaluate(f"{box}.scrollLeft") == 300
    assert tab.locator("td").first.bounding_box()["x"] == pytest.approx(left, abs=1)  # names stay in view
    assert last["x"] < 360
    tab.context.close()


def test_report_requires_finished_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished runs"):
        mnist.write_report([tmp_path], tmp_path)
    assert tables.read(tmp_path / "runs.csv") == []
