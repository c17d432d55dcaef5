"""Nothing in the figures of runs lies over something else, or beyond the edge."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.transforms import Bbox

from helpers.report_runs import shared_runs
from mixwell.lab import arms as experiment
from mixwell.report import arms, run_figures, run_summary, style
from mixwell.report.run_summary import RunSummary


class Recorder(RendererAgg):
    """Draws, and notes every text that it draws with its place."""

    def __init__(self, figure: Any) -> None:
        width, height = FigureCanvasAgg(figure).get_width_height()
        super().__init__(width, height, figure.dpi)
        self.texts: list[tuple[str, Bbox]] = []

    def draw_text(self, gc, x, y, s, prop, angle, ismath: Any = False, mtext=None) -> None:
        if mtext is None:  # one of several lines
            width, height, below = self.get_text_width_height_descent(s, prop, ismath)
            upwards = self.height - y
            box = Bbox.from_bounds(x, upwards - below, width, height)
        else:
            box = mtext.get_window_extent(self)
        self.texts.append((s, box))
        super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)


def trouble(figure: Any) -> list[str]:
    """What lies over something else or is cut off."""
    style.settle(figure)
    recorder = Recorder(figure)
    figure.draw(recorder)
    assert recorder.texts
    found: list[str] = []
    edge = Bbox.from_bounds(-0.5, -0.5, recorder.width + 1, recorder.height + 1)
    for text, box in recorder.texts:
        if not (edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1):
            found.append(f"{text!r} goes beyond the edge")
    for (one, box), (other, beside) in combinations(recorder.texts, 2):
        if overlap(box, beside):
            found.append(f"{one!r} lies over {other!r}")
    panels = [axis for axis in figure.axes if axis.get_visible()]
    legends = [*figure.legends, *(axis.get_legend() for axis in panels if axis.get_legend())]
    boxes = [legend.get_window_extent(recorder) for legend in legends]
    if any(overlap(one, other) for one, other in combinations(boxes, 2)):
        found.append("a legend lies over another")
    if any(overlap(box, axis.get_window_extent(recorder)) for box in boxes for axis in panels):
        found.append("a legend lies over lines")
    for axis in panels:  # what is left of a panel when labels and legends have their room
        box = axis.get_window_extent(recorder)
        if box.width < 1.5 * figure.dpi or box.height < 1.2 * figure.dpi:
            found.append(
                f"a panel is only {box.width / figure.dpi:.1f} x {box.height / figure.dpi:.1f} inches"
            )
    return found


def overlap(one: Bbox, other: Bbox) -> bool:
    """Whether two boxes have more in common than an edge."""
    both = Bbox.intersection(one, other)
    return both is not None and both.width > 0.5 and both.height > 0.5


@pytest.fixture(scope="module", params=[3, 60])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[RunSummary]:
    folders = shared_runs(tmp_path_factory, domains=request.param)
    return [run_summary.read(folder) for folder in folders]


def test_the_check_sees_trouble() -> None:
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
@pytest.mark.parametrize("kind", run_figures.KINDS)
def test_nothing_in_the_panels_of_runs_overlaps(runs: list[RunSummary], kind: str, count: int) -> None:
    shown = [run for run in runs[:count] if run.learned or kind != "hypergradients"]
    drawn = run_figures.draw(run_figures.KINDS[kind], shown, run_figures.domains(runs[:count]))
    assert len(drawn.apart) == len(shown)
    # Each alone, the first, the last and the longest name; and all side by side.
    for figure in {id(one): one for one in (*drawn.apart[:3], drawn.apart[-1], drawn.together)}.values():
        assert trouble(figure) == []


@pytest.mark.parametrize("count", [1, 8])
def test_nothing_in_the_overlay_overlaps(runs: list[RunSummary], count: int) -> None:
    figure = run_figures.overlay(runs[:count])
    assert trouble(figure) == []
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(named) == (count if count > 1 else 0)


def test_a_domain_looks_the_same_in_all_figures_and_others_are_counted(runs: list[RunSummary]) -> None:
    looks = run_figures.domains(runs)
    domains = len(runs[0].domains)
    assert len(looks) == (6 if domains == 60 else domains)
    drawn = run_figures.draw(run_figures.KINDS["weights"], runs[:2], looks)
    for figure in (drawn.together, *drawn.apart):
        words = [text.get_text() for text in figure.legends[0].get_texts()]
        assert words == [*map(style.plain, looks), *(["54 others"] if domains == 60 else [])]
        for axis in figure.axes:
            colors = [line.get_color() for line in axis.lines]
            assert {look.color for look in looks.values()} <= set(colors)
            assert (style.FAINT in colors) == (domains == 60)
    # The same scale, so that runs can be compared.
    assert drawn.apart[0].axes[0].get_ylim() == drawn.apart[1].axes[0].get_ylim()


@pytest.mark.parametrize("domains", [3, 60])
def test_nothing_in_the_figures_of_arms_overlaps(
    domains: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders: list[Path] = shared_runs(tmp_path_factory, domains=domains)
    named = [(folder.name, folder) for folder in folders]
    rows = [experiment._row(name, 0, folder) for name, folder in named]
    curves = [line for name, folder in named for line in experiment._curve(name, 0, folder)]
    weights = [line for name, folder in named for line in experiment._weights(name, 0, folder)]
    looks = dict(zip((name for name, _ in named), style.looks(len(named)), strict=True))
    for panels in ((arms.FINALS, arms.CURVE), (arms.FINALS,), (arms.CURVE,)):
        assert trouble(arms._comparison(rows, curves, looks, panels)) == []
    moving = arms._moving(weights, list(looks))
    assert len(moving) == 6
    assert trouble(arms._weights_figure(weights, moving)) == []
    assert trouble(arms._weights_figure(weights, moving[-1:])) == []
