"""Draws the two figures of the page "How it works".

python docs/figures.py [FOLDER]   (default: docs/assets)
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from mixwell.lab.quadratic import example
from mixwell.reference import theory
from mixwell.report import style

HERE = Path(__file__).parent
RUNS = HERE.parent / "results" / "mnist-n1000" / "runs.csv"
LINES = ((1, "-"), (10, "--"), (100, ":"))


def main(folder: Path) -> None:
    """Draw both figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("short-horizons", short_horizons), ("long-horizons", long_horizons)):
        # A small figure with a large font, to be readable on a phone.
        figure, axes = style.new_figure(1, 1, width=5.6, height=3.4)
        draw(axes[0, 0])
        axes[0, 0].tick_params(labelsize=11)
        figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})


def short_horizons(axis: Any) -> None:
    """Plot the weight of the right one of two quadratics over training, with the real mixer."""
    setting = example.QuadraticSettings(radius=150.0, step_size=1.0)
    for (horizon, line), color in zip(LINES, style.COLORS, strict=False):
        path = example.run(setting, horizon)
        axis.plot(path.steps, path.weight, line, color=color, lw=2.4, label=f"T = {horizon}")
    axis.axhline(0.5, color=style.FAINT, lw=1, zorder=0)
    axis.set_ylim(-0.04, 1.04)
    axis.set_xlabel("training steps", fontsize=12)
    axis.set_ylabel("weight of the right domain", fontsize=12)
    axis.legend(fontsize=12, frameon=False, loc=(0.22, 0.16))


def long_horizons(axis: Any) -> None:
    """Plot the validation loss on MNIST against the horizon, from the runs in results/."""
    losses: dict[int, list[float]] = defaultdict(list)
    with RUNS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            losses[int(row["horizon"])].append(float(row["validation_loss"]))
    horizons = sorted(losses)
    axis.plot(horizons, [mean(losses[t]) for t in horizons], "o-", color=style.COLORS[0], lw=2.4, ms=6)
    for horizon in horizons:
        seeds = losses[horizon]
        axis.plot([horizon] * len(seeds), seeds, "o", color=style.COLORS[5], ms=4, zorder=0)
    best = theory.stochastic_horizon(1000)
    axis.axvline(best, color=style.COLORS[1], lw=1.6, ls="--")
    axis.text(best, axis.get_ylim()[1], f"sqrt(N log N) = {best} ", fontsize=11, va="top", ha="right")
    style.log_axis(axis, "")
    axis.set_xlabel("T, training steps per weight update", fontsize=12)
    axis.set_ylabel("validation loss", fontsize=12)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "assets")
