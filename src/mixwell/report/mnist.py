"""Figures and page of the MNIST experiment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mixwell.lab.mnist.curves import NEAR, Curve, curve_table, curves_of, verdict
from mixwell.lab.mnist.experiment import DOMAINS, ROTATED
from mixwell.lab.mnist.sweep import Results
from mixwell.lab.tables import Row
from mixwell.report import page, style
from mixwell.report.page import DataTable, Page, PageSection, Picture
from mixwell.utils import environment

PANELS = (
    ("validation_loss", "validation loss"),
    ("validation_accuracy", "validation accuracy"),
    (f"last_{ROTATED}", "weight of the rotated domain, w₂"),
)
SHOWN = 6
FAR = 6.0
DESCRIPTION = (
    "A network is trained on vanilla, rotated and noisily labeled digits; the validation set has digits rotated "
    "by one angle. Each point is a training run with its own horizon T, or the mean of several seeds (the paper’s "
    "Algorithm 3)."
)
NOTE = (
    "* marks the theory’s T = sqrt(N log N). The test loss is on the test images that are not in the validation "
    "set, under the same rotation. With T = N the weights move once, after training, and say nothing about the "
    "network that was trained."
)


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draw the figures of one or several sweeps, write the page, and return the files, the page last."""
    results = [Results(folder) for folder in folders]
    runs = list({row["run"]: row for result in results for row in result.runs}.values())
    weights = list({(row["run"], row["step"]): row for result in results for row in result.weights}.values())
    curves = curves_of(runs)
    out.mkdir(parents=True, exist_ok=True)
    written = style.save(_panels_figure(curves), out / "panels")
    written += style.save(_weights_figure(curves, weights), out / "weights")
    examples = next((f / "examples.png" for f in folders if (f / "examples.png").exists()), None)
    return [*written, page.write_page(_page(curves, weights, examples, folders), out / "report.html")]


def draw_examples(batches: Sequence[tuple[str, Any, Any]], out: Path) -> list[Path]:
    """Draw a row of images and labels for each domain, given as name, images ``(n, 28, 28)`` and labels."""
    count = len(batches[0][2])
    figure, axes = style.new_figure(len(batches), count, width=1.0 * count + 1.2, height=1.15)
    for row, (name, images, labels) in enumerate(batches):
        for column in range(count):
            axis = axes[row, column]
            axis.imshow(images[column], cmap="gray_r", interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.grid(False)
            axis.spines[:].set_visible(False)
            axis.set_title(f"“{int(labels[column])}”", fontsize=9, color=style.INK, pad=2)
        axes[row, 0].set_ylabel(name, fontsize=10, rotation=0, ha="right", va="center", color=style.INK)
    return style.save(figure, out / "examples")


def _by_budget(curves: Sequence[Curve]) -> dict[int, list[Curve]]:
    budgets = sorted({curve.budget for curve in curves})
    return {budget: [c for c in curves if c.budget == budget] for budget in budgets}


def _panels_figure(curves: Sequence[Curve]) -> Any:
    groups = _by_budget(curves)
    figure, axes = style.new_figure(len(groups), len(PANELS), width=13.0, height=3.6)
    for row, own in enumerate(groups.values()):
        for column, (name, title) in enumerate(PANELS):
            _panel(axes[row, column], own, name, title)
            axes[row, column].set_title(f"N = {own[0].budget} training steps", fontsize=10, color=style.INK)
    return figure


def _panel(axis: Any, curves: Sequence[Curve], name: str, title: str) -> None:
    looks = style.line_styles(len(curves))
    for index, curve in enumerate(curves):
        color, marker = looks[index].color, looks[index].marker
        mean, deviation = curve.mean(name), curve.deviation(name)
        axis.plot(curve.horizons, mean, color=color, marker=marker, ms=4, label=curve.label, zorder=3)
        if curve.seeds > 1:
            low, high = mean - deviation, mean + deviation
            if "loss" not in name:  # accuracies and weights are within [0, 1]
                low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
            axis.fill_between(curve.horizons, low, high, color=color, alpha=0.18, lw=0)
            for horizon, rows in zip(curve.horizons, curve.rows, strict=True):
                axis.plot([horizon] * len(rows), [r[name] for r in rows], ".", color=color, ms=3, alpha=0.5)
        if name.startswith("last_"):
            average = curve.mean(name.replace("last_", "average_"))
            label = "average over the run" if index == 0 else None
            axis.plot(curve.horizons, average, color=color, lw=1, ls=":", label=label)
    if name.startswith(("last_", "average_")):
        axis.set_ylim(-0.03, 1.03)
    elif "loss" in name:
        means = np.concatenate([curve.mean(name) for curve in curves])
        if means.max() > FAR * means.min() > 0:  # otherwise one bad horizon would flatten all others
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="y", which="minor", colors=style.INK, labelsize=8)
    _theory_line(axis, curves[0])
    style.log_axis(axis, "horizon T")
    axis.set_ylabel(title, fontsize=9)
    style.legend_under(axis)


def _theory_line(axis: Any, curve: Curve) -> None:
    axis.axvline(
        curve.theory, color=style.FAINT, ls="--", lw=1, zorder=1, label=f"theory, T = {curve.theory}"
    )


def _valleys(axis: Any, curves: Sequence[Curve]) -> None:
    """Draw the loss of each curve relative to its lowest, and bars over the horizons near that."""
    looks = style.line_styles(len(curves))
    for index, curve in enumerate(curves):
        color, marker = looks[index].color, looks[index].marker
        loss = curve.mean("validation_loss")
        axis.plot(curve.horizons, loss / loss.min(), marker=marker, ms=4, color=color, label=curve.label)
        near = [t for t, value in zip(curve.horizons, loss, strict=True) if value <= NEAR * loss.min()]
        height = 0.97 - 0.02 * index
        axis.plot([near[0], near[-1]], [height, height], color=color, lw=4, alpha=0.6, solid_capstyle="butt")
    _theory_line(axis, curves[0])
    style.log_axis(axis, "horizon T")
    axis.set_ylabel("validation loss / its lowest", fontsize=9)
    axis.set_title(f"N = {curves[0].budget} training steps", fontsize=10, color=style.INK)
    style.legend_under(axis)


def _shown(curve: Curve) -> list[int]:
    """Return some horizons of a curve: the ends, the theory's, the best, and others between."""
    if len(curve.horizons) <= SHOWN:
        return curve.horizons
    wanted = {1, curve.theory, curve.budget, curve.horizons[curve.best]} & set(curve.horizons)
    for t in np.array(curve.horizons)[np.linspace(0, len(curve.horizons) - 1, SHOWN).round().astype(int)]:
        if len(wanted) < SHOWN:
            wanted.add(int(t))
    return sorted(wanted)


def _weights_figure(curves: Sequence[Curve], weights: Sequence[Row]) -> Any:
    figure, axes = style.new_figure(len(curves), SHOWN, width=2.6 * SHOWN, height=2.4)
    for row, curve in enumerate(curves):
        shown = _shown(curve)
        for column in range(SHOWN):
            if column < len(shown):
                _weights(axes[row, column], curve, shown[column], weights)
            else:
                axes[row, column].set_visible(False)
        axes[row, 0].set_ylabel(f"weight\n(N = {curve.budget}, {curve.label})", fontsize=8)
    style.legend_under(axes[0, 0])
    return figure


def _weights(axis: Any, curve: Curve, horizon: int, weights: Sequence[Row]) -> None:
    """Draw the weights of the domains over training with one horizon, a line per seed."""
    runs = [row["run"] for row in curve.rows[curve.horizons.index(horizon)]]
    for number, run in enumerate(runs):
        history = [row for row in weights if row["run"] == run]
        for index, domain in enumerate(DOMAINS):
            axis.plot(
                [row["step"] for row in history],
                [row[domain] for row in history],
                color=style.COLORS[index],
                lw=1.2,
                alpha=1.0 if number == 0 else 0.45,
                drawstyle="steps-post",
                label=domain if number == 0 else None,
            )
    axis.set_ylim(-0.03, 1.03)
    axis.set_title(f"T = {horizon}", fontsize=9, color=style.INK)
    axis.set_xlabel("training steps", fontsize=8)


def _page(
    curves: Sequence[Curve], weights: Sequence[Row], examples: Path | None, folders: Sequence[Path]
) -> Page:
    sections = [_panel_section(own) for own in _by_budget(curves).values()]
    sections += [_weights_section(curve, weights) for curve in curves]
    if examples is not None:
        shown = Picture.from_png(examples, "Images and labels of the domains (from MNIST, LeCun and Cortes).")
        sections.insert(0, PageSection("The domains", pictures=[shown], columns=1))
    names = list(curves[0].setting)
    settings = [[name.replace("_", " "), *(f"{curve.setting[name]:g}" for curve in curves)] for name in names]
    tables = [
        DataTable(*curve_table(curve), f"N = {curve.budget}, {curve.label}, means of {curve.seeds} seed(s)")
        for curve in curves
    ]
    sections.append(PageSection("Results", [NOTE], tables=tables))
    table = DataTable(["setting", *(curve.label for curve in curves)], settings)
    sections.append(PageSection("Settings", tables=[table]))
    lead = [*(verdict(curve) for curve in curves), DESCRIPTION]
    return Page("MNIST: validation loss against the horizon", lead, sections, environment.facts(folders))


def _panel_section(curves: Sequence[Curve]) -> PageSection:
    several = any(curve.seeds > 1 for curve in curves)
    seeds = "; mean, standard deviation and runs of the seeds." if several else "."
    pictures = [
        Picture.from_panel(
            partial(_panel, curves=curves, name=name, title=title),
            f"{title[0].upper()}{title[1:]} at the end of training against the horizon T{seeds}",
        )
        for name, title in PANELS
    ]
    if len(curves) > 1:
        text = "Validation loss relative to its lowest; the bars are the horizons within 5% of it."
        pictures.append(Picture.from_panel(partial(_valleys, curves=curves), text))
    return PageSection(f"N = {curves[0].budget} training steps", (), pictures)


def _weights_section(curve: Curve, weights: Sequence[Row]) -> PageSection:
    pictures: list[Picture] = []
    for horizon in _shown(curve):
        figure, axes = style.new_figure(1, 1, width=4.0, height=3.0)
        _weights(axes[0, 0], curve, horizon, weights)
        style.legend_under(axes[0, 0])
        text = f"Weights of the domains over training with T = {horizon}."
        pictures.append(Picture.from_figure(figure, text))
    return PageSection(f"Weights over training, N = {curve.budget}, {curve.label}", pictures=pictures)
