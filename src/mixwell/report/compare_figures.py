"""Pictures of a comparison in the plane: what a low loss costs, and losses over training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mixwell.lab.tables import Row
from mixwell.report import lines, style
from mixwell.report.compare_rows import KEY, KINDS, LETTERS, key, limits
from mixwell.report.lines import Course
from mixwell.report.standings import PROPORTIONAL, UNIFORM, Standing, number, of_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Box = tuple[float, float, float, float]

COSTS: Mapping[str, tuple[Callable[[Standing], float], str]] = {
    "seconds": (lambda one: one.seconds, "seconds, trials included"),
    "compute": (lambda one: one.compute, "compute in training steps, trials included"),
    "steps": (lambda one: one.steps, "training steps of the last run"),
}
"""What may be laid against the loss, and how it is called."""
DIFFERS = 1.02
WIDE = 20.0
LABELLED = 6
BEST = 6
HIGH = 0.97  # of a panel's height, where arrows are
LATE = 0.25  # of a line, after which lines are told apart


def costs(found: Sequence[Standing]) -> list[str]:
    """The costs that can tell arms apart.

    Args:
        found: the arms.

    Returns:
        Keys of :data:`COSTS`: seconds, and those in which arms differ by more than 2%.
    """
    shown = ["seconds"]
    for name in ("compute", "steps"):
        values = [value for one in found if math.isfinite(value := COSTS[name][0](one))]
        if values and max(values) > DIFFERS * min(values):
            shown.append(name)
    return shown


def cost(found: Sequence[Standing], names: Sequence[str], label: str) -> Figure:
    """The mean loss of the arms against what they cost.

    Args:
        found: the arms, in their order.
        names: of the costs, a panel for each.
        label: what the loss is of.

    Returns:
        The figure. Named are the best of each kind, and uniform and proportional weights.
    """
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in found)]
    width = style.PANEL * len(names)
    figure, axes = style.new_figure(1, len(names), width=width, height=3.2, below=KEY)
    ends = limits(found)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_ylim(ends)
        _cost_axis(axis, [COSTS[name][0](one) for one in found], COSTS[name][1])
    axes[0, 0].set_ylabel(f"mean {label}", fontsize=9)
    base = of_method(found, UNIFORM)
    key(figure, kinds, uniform=base is not None)
    style.settle(figure)  # places of labels are found in points, so axes must be where they will be
    allowed = {one.budget for one in found}
    for axis, name in zip(axes[0], names, strict=True):
        if name == "compute" and len(allowed) == 1 and all(map(math.isfinite, allowed)):
            axis.axvline(*allowed, color="#777777", ls=style.DASHES[3], lw=1, zorder=1.5)
        if base is not None and base.mean <= ends[1]:
            axis.axhline(base.mean, color="#777777", ls=style.DASHES[1], lw=1, zorder=1.5)
        _cloud(axis, found, COSTS[name][0])
    return figure


def shown_curves(found: Sequence[Standing]) -> list[str]:
    """The arms whose losses over training are shown: the best and the plain baselines, unless they are far off.

    Args:
        found: the arms, in their order.

    Returns:
        Their names.
    """
    plain = [of_method(found, UNIFORM), of_method(found, PROPORTIONAL)]
    shown = dict.fromkeys(one.arm for one in (*found[:BEST], *plain) if one is not None)
    near = {one.arm for one in found if one.mean <= limits(found)[1]}
    return [arm for arm in shown if arm in near]


def courses(curves: Sequence[Row], arms: Sequence[str]) -> dict[str, Course]:
    """Validation loss over compute, means over the seeds.

    Args:
        curves: of the table of curves.
        arms: whose.

    Returns:
        Points where all seeds of the arm have a loss, by arm; without arms that have none.
    """
    made: dict[str, Course] = {}
    for arm in arms:
        own = [row for row in curves if str(row["arm"]) == arm and row.get("validation_loss", "") != ""]
        seeds = len({row["seed"] for row in own})
        at: dict[float, list[Row]] = {}
        for row in own:
            at.setdefault(number(row["step"]), []).append(row)
        points = [rows for _, rows in sorted(at.items()) if len(rows) == seeds]
        if points:
            spent = [_mean(rows, "compute" if "compute" in own[0] else "step") for rows in points]
            made[arm] = lines.course(spent, [_mean(rows, "validation_loss") for rows in points])
    return made


def over_training(made: Mapping[str, Course]) -> Figure:
    """The validation loss of some arms over what they had computed by then.

    Args:
        made: the lines, by arm.

    Returns:
        The figure. Methods that train other runs first begin later.
    """
    looks = dict(zip(made, style.looks(len(made)), strict=True))
    below = lines.legend_height(list(looks), style.PANEL)
    figure, axes = style.new_figure(1, 1, width=style.PANEL, height=3.2, below=below)
    axis = axes[0, 0]
    lines.draw(axis, looks, made, marked=True)
    # Each from its own begin to its own end, since the first fall of a line that begins late is late.
    own = [((x - x[0]) / ((x[-1] - x[0]) or 1.0), y) for x, y in made.values()]
    axis.set_ylim(lines.late_limits(own, LATE / lines.EARLY))
    axis.set_xlim(0, 1.03 * max(float(x[-1]) for x, _ in made.values()))
    style.count_axis(axis.xaxis)
    axis.set_xlabel("computed so far, in training steps", fontsize=9)
    axis.set_ylabel("validation loss", fontsize=9)
    lines.legend(figure, looks, markers=True)
    return figure


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(number(row[name]) for row in rows) / len(rows)


def _cost_axis(axis: Any, values: Sequence[float], label: str) -> None:
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low > 0 and high > WIDE * low:
        style.log_axis(axis, label)
        axis.set_xlim(low / 1.5, high * 3)
    else:
        style.count_axis(axis.xaxis)
        axis.set_xlabel(label, fontsize=9)
        axis.set_xlim(0, 1.25 * high)  # with room for names


def _cloud(axis: Any, found: Sequence[Standing], spent: Callable[[Standing], float]) -> None:
    """Points of the arms, and names of some where there is room."""
    low, high = axis.get_ylim()
    places: dict[str, tuple[float, float]] = {}
    for one in found:
        if not (math.isfinite(one.mean) and math.isfinite(spent(one))):
            continue
        look = KINDS.get(one.kind, KINDS["static"])
        height, marker, size = one.mean, look.marker, 5.5
        if one.mean > high:  # an arrow at the edge
            height, marker, size = low + HIGH * (high - low), "$\u2191$", 8.0
        axis.plot(spent(one), height, marker=marker, color=look.color, alpha=0.7, ms=size, mew=0)
        places[one.arm] = (spent(one), height)
    beyond = {one.arm: one.mean for one in found if one.mean > high}
    _label(axis, places, _worth_naming(found), beyond)


def _worth_naming(found: Sequence[Standing]) -> list[str]:
    """All where they are few; else the best of each kind and the plain baselines."""
    if len(found) <= LABELLED:
        return [one.arm for one in found]
    plain = [of_method(found, UNIFORM), of_method(found, PROPORTIONAL)]
    of_kinds = [next((one for one in found if one.kind == kind), None) for kind in KINDS]
    return list(dict.fromkeys(one.arm for one in (found[0], *plain, *of_kinds) if one is not None))


def _label(
    axis: Any, places: Mapping[str, tuple[float, float]], names: Sequence[str], beyond: Mapping[str, float]
) -> None:
    """Write names beside their points, where they cover neither points nor each other."""
    scale = 72 / axis.figure.dpi
    points = {arm: scale * axis.transData.transform(place) for arm, place in places.items()}
    x0, y0, x1, y1 = (scale * value for value in axis.get_window_extent().extents)
    taken = {arm: (x - 3, y - 4, x + 3, y + 4) for arm, (x, y) in points.items()}
    written: list[Box] = []
    for name in names:
        if name not in points:
            continue
        text = style.short(name, LETTERS, 0.45 * (x1 - x0))
        text += f" {beyond[name]:.4g}" if name in beyond else ""
        others = [*written, *(box for arm, box in taken.items() if arm != name)]
        x, y = map(float, points[name])
        for left, low, right, high in _around(x, y, style.text_width(text, LETTERS)):
            inside = x0 < left and right < x1 and y0 < low and high < y1
            if inside and not any(_cross((left, low, right, high), other) for other in others):
                written.append((left, low, right, high))
                axis.annotate(
                    style.plain(text),
                    places[name],
                    (left - x, low - y),
                    textcoords="offset points",
                    fontsize=LETTERS,
                    color=style.INK,
                    va="bottom",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3},
                )
                break


def _around(x: float, y: float, wide: float) -> list[Box]:
    """Where a word may stand beside a point: at its sides, below, above, and between these."""
    sides = {1: x + 4, 0: x - wide / 2, -1: x - 4 - wide}
    places = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
    lows = [y - LETTERS / 2 + up * (LETTERS / 2 + (2 if across else 4)) for across, up in places]
    return [
        (sides[across], low, sides[across] + wide, low + LETTERS)
        for (across, _), low in zip(places, lows, strict=True)
    ]


def _cross(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
