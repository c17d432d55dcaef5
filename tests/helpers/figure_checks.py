"""Check that nothing in a figure overlaps or is cut off."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.transforms import Bbox

from mixwell.report import style


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
