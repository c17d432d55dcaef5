"""The picture of the quadratic example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mixwell.lab.quadratic.example import Path, Setting
from mixwell.report import style


def draw(runs: Mapping[tuple[Setting, int], Path], shown: Sequence[int], path: FilePath) -> list[FilePath]:
    """Final weight against horizon for every setting; parameter and weight over time for the first one.

    Args:
        runs: by setting and horizon.
        shown: the horizons whose course is drawn.
        path: where to, without ending.

    Returns:
        The files.
    """
    figure, axes = style.new_figure(1, 3, width=12.0, height=3.8)
    settings = list(dict.fromkeys(setting for setting, _ in runs))
    _against_horizon(axes[0, 0], settings, runs)
    first = settings[0]
    courses = [runs[first, t] for t in shown if (first, t) in runs]
    _over_time(axes[0, 1], courses, "theta")
    _over_time(axes[0, 2], courses, "weight")
    start = f"R = {first.radius:g}, α = {first.step_size:g}"
    axes[0, 1].set_title(f"the parameter over training ({start})", fontsize=10, color=style.INK)
    axes[0, 1].set_yscale("symlog", linthresh=1.0)
    axes[0, 1].set_ylabel("θ (the optimum is 0)", fontsize=9)
    axes[0, 2].set_title(f"the weight over training ({start})", fontsize=10, color=style.INK)
    axes[0, 2].set_ylabel("weight of the right domain", fontsize=9)
    axes[0, 2].set_ylim(-0.04, 1.04)
    return style.save(figure, path)


def _against_horizon(
    axis: Any, settings: Sequence[Setting], runs: Mapping[tuple[Setting, int], Path]
) -> None:
    for index, setting in enumerate(settings):
        horizons = sorted(t for s, t in runs if s == setting)
        axis.plot(
            horizons,
            [runs[setting, t].weight[-1] for t in horizons],
            marker="o",
            markersize=4,
            color=style.COLOURS[index % len(style.COLOURS)],
            linestyle=("-", "--", ":", "-.")[index % 4],
            label=f"R = {setting.radius:g}, α = {setting.step_size:g}",
        )
    axis.axhline(0.5, color=style.FAINT, linewidth=1, zorder=0)
    axis.annotate(
        "where it started",
        (1, 0.5),
        (-2, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
        color="#777777",
        ha="right",
    )
    style.log_axis(axis, "horizon T (steps per weight update)")
    axis.set_ylim(-0.04, 1.04)
    axis.set_ylabel("final weight of the right domain", fontsize=9)
    axis.set_title(f"N = {settings[0].budget} training steps", fontsize=10, color=style.INK)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _over_time(axis: Any, courses: Sequence[Path], what: str) -> None:
    for index, course in enumerate(courses):
        axis.plot(
            course.steps,
            np.asarray(getattr(course, what)),
            color=style.COLOURS[index % len(style.COLOURS)],
            linestyle=("-", "--", ":", "-.")[index % 4],
            marker="o" if len(course.steps) < 40 else None,
            markersize=3,
            label=f"T = {course.horizon}",
        )
    axis.set_xlabel("training steps", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
