"""The figure of the quadratic example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixwell.lab import tables
from mixwell.lab.quadratic.command import TABLE
from mixwell.lab.tables import Row, column
from mixwell.report import style

Instance = tuple[float, float]
"""R and alpha."""


def write_report(folder: Path, out: Path) -> list[Path]:
    """Draw the final weight against the horizon of all instances, and the first instance over training."""
    rows = tables.read(folder / TABLE)
    runs: dict[Instance, dict[int, list[Row]]] = {}
    for row in rows:
        instance = float(row["radius"]), float(row["step_size"])
        runs.setdefault(instance, {}).setdefault(int(row["horizon"]), []).append(row)
    figure, axes = style.new_figure(1, 3, width=12.0, height=3.8)
    _against_horizon(axes[0, 0], runs, int(rows[0]["budget"]))
    (radius, step_size), first = next(iter(runs.items()))
    horizons = sorted(first)
    shown = [t for t in (1, 10, 100) if t in first] or horizons[:: max(1, len(horizons) // 3)][:3]
    instance = f"R = {radius:g}, α = {step_size:g}"
    _over_time(axes[0, 1], {t: first[t] for t in shown}, "theta")
    axes[0, 1].set_title(f"the parameter over training ({instance})", fontsize=10, color=style.INK)
    axes[0, 1].set_yscale("symlog", linthresh=1.0)
    axes[0, 1].set_ylabel("θ (the optimum is 0)", fontsize=9)
    _over_time(axes[0, 2], {t: first[t] for t in shown}, "weight")
    axes[0, 2].set_title(f"the weight over training ({instance})", fontsize=10, color=style.INK)
    axes[0, 2].set_ylabel("weight of the right domain", fontsize=9)
    axes[0, 2].set_ylim(-0.04, 1.04)
    out.mkdir(parents=True, exist_ok=True)
    return style.save(figure, out / "quadratic")


def _against_horizon(axis: Any, runs: Mapping[Instance, Mapping[int, Sequence[Row]]], budget: int) -> None:
    looks = style.line_styles(len(runs))
    for look, ((radius, step_size), own) in zip(looks, runs.items(), strict=True):
        horizons = sorted(own)
        weights = [float(own[t][-1]["weight"]) for t in horizons]
        label = f"R = {radius:g}, α = {step_size:g}"
        axis.plot(horizons, weights, marker="o", ms=4, color=look.color, ls=look.dashes, label=label)
    axis.axhline(0.5, color=style.FAINT, linewidth=1, zorder=0, label="initial weight")
    style.log_axis(axis, "horizon T (steps per weight update)")
    axis.set_ylim(-0.04, 1.04)
    axis.set_ylabel("final weight of the right domain", fontsize=9)
    axis.set_title(f"N = {budget} training steps", fontsize=10, color=style.INK)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _over_time(axis: Any, runs: Mapping[int, Sequence[Row]], name: str) -> None:
    for look, (horizon, rows) in zip(style.line_styles(len(runs)), runs.items(), strict=True):
        axis.plot(
            column(rows, "step"),
            column(rows, name),
            color=look.color,
            ls=look.dashes,
            marker="o" if len(rows) < 40 else None,
            ms=3,
            label=f"T = {horizon}",
        )
    axis.set_xlabel("training steps", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
