"""Nothing in the figures of runs lies over something else, or beyond the edge."""

from __future__ import annotations

import pytest

from helpers.figure_checks import trouble
from helpers.report_runs import shared_runs
from mixwell.report import run_figures, run_summary, style
from mixwell.report.run_summary import RunSummary


@pytest.fixture(scope="module", params=[3, 60])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[RunSummary]:
    folders = shared_runs(tmp_path_factory, domains=request.param)
    return [run_summary.read(folder) for folder in folders]


def test_overlap_check_detects_overlaps() -> None:
    figure, axes = style.new_figure(1, 1, width=4, height=3)
    axes[0, 0].plot([0, 1], [0, 1], label="a line")
    assert trouble(figure) == []
    axes[0, 0].text(0.5, 0.5, "some text")
    axes[0, 0].text(0.52, 0.5, "more of it")
    axes[0, 0].legend()
    figure.text(0.98, 0.5, "cut off")
    found = "; ".join(trouble(figure))
    for part in ("'some text' lies over", "'cut off' goes beyond", "a legend lies over lines"):
        assert part in found


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", run_figures.PANEL_KINDS)
def test_run_panels_do_not_overlap(runs: list[RunSummary], kind: str, count: int) -> None:
    shown = [run for run in runs[:count] if run.learned or kind != "hypergradients"]
    drawn = run_figures.draw(run_figures.PANEL_KINDS[kind], shown, run_figures.domain_styles(runs[:count]))
    assert len(drawn.apart) == len(shown)
    # Each alone, the first, the last and the longest name; and all side by side.
    for figure in {id(one): one for one in (*drawn.apart[:3], drawn.apart[-1], drawn.together)}.values():
        assert trouble(figure) == []


@pytest.mark.parametrize("count", [1, 8])
def test_overlay_does_not_overlap(runs: list[RunSummary], count: int) -> None:
    figure = run_figures.overlay(runs[:count])
    assert trouble(figure) == []
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(named) == (count if count > 1 else 0)


def test_domain_style_is_the_same_in_all_figures(runs: list[RunSummary]) -> None:
    styles = run_figures.domain_styles(runs)
    domains = len(runs[0].domains)
    assert len(styles) == (6 if domains == 60 else domains)
    drawn = run_figures.draw(run_figures.PANEL_KINDS["weights"], runs[:2], styles)
    for figure in (drawn.together, *drawn.apart):
        words = [text.get_text() for text in figure.legends[0].get_texts()]
        assert words == [*map(style.label, styles), *(["54 others"] if domains == 60 else [])]
        for axis in figure.axes:
            colors = [line.get_color() for line in axis.lines]
            assert {own.color for own in styles.values()} <= set(colors)
            assert (style.FAINT in colors) == (domains == 60)
    # The same scale, so that runs can be compared.
    assert drawn.apart[0].axes[0].get_ylim() == drawn.apart[1].axes[0].get_ylim()
