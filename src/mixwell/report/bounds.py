"""Figures and page of the theorems' bounds and the measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mixwell.lab import tables
from mixwell.lab.bounds.cells import MEASUREMENTS
from mixwell.lab.bounds.problems import CURVATURES
from mixwell.lab.bounds.scaling import Best, BestHorizon, Fit, growth_of, growth_table
from mixwell.lab.bounds.theorem import compare_with_bounds, verdict
from mixwell.lab.tables import Row, column
from mixwell.reference.theory import stochastic_horizon
from mixwell.report import page, style
from mixwell.report.page import DataTable, Page, PageSection, Picture
from mixwell.utils import environment

TABLE = (
    "95% Student intervals over the problems; ratios at the largest budget; best horizons that are too short for "
    "the theorem"
)
Drawing = tuple[Callable[[Any], None], str]
"""Draws into an axis; and the caption."""


def write_report(folder: Path, out: Path) -> list[Path]:
    """Draw the figures, write the page, and return the files, the page last.

    Raises:
        ValueError: There are no measurements.
    """
    rows = tables.read(folder / MEASUREMENTS)
    if not rows:
        raise ValueError(f"there are no measurements in {folder}")
    best, fits = growth_of(rows)
    out.mkdir(parents=True, exist_ok=True)
    theorem = _theorem_drawings(rows)
    growth = _growth_drawings(rows, best, fits)
    written = _save(theorem, out / "theorem") + _save(growth, out / "horizons")
    return [*written, page.write_page(_page(rows, theorem, growth, best, fits, folder), out / "report.html")]


def _save(drawings: Sequence[Drawing], path: Path) -> list[Path]:
    columns = 3
    figure, axes = style.new_figure(-(-len(drawings) // columns), columns, width=14.0, height=3.8)
    for axis in axes.flat[len(drawings) :]:
        axis.set_visible(False)
    for axis, (draw, _) in zip(axes.flat, drawings, strict=False):
        draw(axis)
    return style.save(figure, path)


def _pictures(drawings: Sequence[Drawing]) -> list[Picture]:
    return [Picture.from_panel(draw, text, width=4.8, height=3.8) for draw, text in drawings]


def _select(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _theorem_drawings(rows: Sequence[Row]) -> list[Drawing]:
    drawings: list[Drawing] = []
    theorem = _select(rows, purpose="theorem", seed=0)
    for kind, noisy in dict.fromkeys((str(r["kind"]), int(r["noisy"])) for r in theorem):
        own = _select(theorem, kind=kind, noisy=noisy, curvature="exact")
        gradients = f"{kind}, {'noisy' if noisy else 'full'} gradients"
        text = f"Measured F(w_avg) - F* and its bound against T: {gradients}, exact curvature, one problem."
        drawings.append((partial(_gap, rows=own, title=gradients), text))
        if not noisy:
            shared = _select(theorem, kind=kind, noisy=0, curvature="isotropic")
            errors = _select(theorem, kind=kind, noisy=0, budget=max(int(r["budget"]) for r in shared))
            text = (
                f"Largest error of a round's hypergradient and its bound, by curvature: {kind}, one problem."
            )
            drawings.append((partial(_error, rows=errors, title=f"{kind}: a round's hypergradient"), text))
    return drawings


def _gap(axis: Any, rows: Sequence[Row], title: str) -> None:
    for index, budget in enumerate(sorted({int(r["budget"]) for r in rows})):
        own = _select(rows, budget=budget)
        color = style.COLORS[index]
        horizons = column(own, "horizon")
        axis.plot(horizons, column(own, "gap"), "o-", ms=3, color=color, label=f"measured, N = {budget:,}")
        axis.plot(horizons, column(own, "bound"), "--", color=color, label=f"bound, N = {budget:,}")
    _finish(axis, title, "horizon T", "F(w_avg) − F*")


def _error(axis: Any, rows: Sequence[Row], title: str) -> None:
    for index, kind in enumerate(CURVATURES):
        own = _select(rows, curvature=kind)
        error = np.array(column(own, "error"))
        # The error enters the bound twice, so its own bound is half of those two parts.
        bound = (np.array(column(own, "bound_horizon")) + np.array(column(own, "bound_curvature"))) / 2
        horizons = np.array(column(own, "horizon"))
        seen = error > 0
        color = style.COLORS[index]
        axis.plot(horizons[seen], error[seen], "o-", ms=3, color=color, label=f"{kind}, measured")
        shown = bound > 1e-9
        axis.plot(horizons[shown], bound[shown], "--", color=color, label=f"{kind}, bound")
    _finish(axis, title, "horizon T", "max |h − ∇F|")


def _growth_drawings(rows: Sequence[Row], best: Best, fits: Sequence[Fit]) -> list[Drawing]:
    drawings: list[Drawing] = []
    for fit in fits:
        law = "(N log N)^b" if fit.noisy else "a + b log N"
        text = (
            f"Best horizon against the budget: {fit.kind}, {'noisy' if fit.noisy else 'full'} gradients; measured "
            f"(each problem and their mean), the fit T = {law} with b = {fit.slope}, and theory."
        )
        drawings.append((partial(_growth, found=best[fit.kind, fit.noisy], fit=fit), text))
    noisy = _select(rows, purpose="scaling", kind="noisy quadratic", noisy=1, seed=0)
    if noisy:
        text = (
            "Measured F(w_avg) - F* against T for several budgets, one noisy quadratic; the crosses are the "
            "paper's T."
        )
        drawings.append((partial(_valleys, rows=noisy), text))
    return drawings


def _growth(axis: Any, found: Sequence[BestHorizon], fit: Fit) -> None:
    budgets = np.array(sorted({b.budget for b in found}), dtype=np.float64)
    axis.plot(
        [b.budget for b in found],
        [b.measured for b in found],
        ".",
        color=style.COLORS[0],
        alpha=0.35,
        ms=5,
        label="measured, each problem",
    )
    by_budget = [np.array([b.measured for b in found if b.budget == n]) for n in budgets]
    # The fit with noise is of log T, so the mean of T is geometric there.
    means = [np.exp(np.log(own).mean()) if fit.noisy else own.mean() for own in by_budget]
    axis.plot(budgets, means, "o", color=style.COLORS[0], ms=6, label="measured, mean")
    law = f"fit: (N log N)^{fit.slope.mean:.2f}" if fit.noisy else f"fit: a + {fit.slope.mean:.2f} log N"
    fine = np.geomspace(budgets[0], budgets[-1], 50)
    axis.plot(fine, fit.predict(fine), "-", color=style.COLORS[0], lw=1.2, label=law)
    # NaN where the theorem does not apply.
    known = [[b.theory for b in found if b.budget == n and not np.isnan(b.theory)] for n in budgets]
    ideal = [np.mean(own) if own else np.nan for own in known]
    axis.plot(budgets, ideal, "s--", color=style.COLORS[1], ms=4, lw=1, label="lowest bound")
    chosen = [np.mean([b.choice for b in found if b.budget == n]) for n in budgets]
    name = "√(N log N)" if fit.noisy else "2 log N / (ημ)"
    axis.plot(budgets, chosen, ":", color=style.COLORS[2], lw=1.5, label=name)
    gradients = "noisy" if fit.noisy else "full"
    _finish(axis, f"{fit.kind}, {gradients} gradients", "budget N", "best horizon T")


def _valleys(axis: Any, rows: Sequence[Row]) -> None:
    for index, budget in enumerate(sorted({int(r["budget"]) for r in rows})[::2]):
        own = _select(rows, budget=budget)
        horizons, gap = np.array(column(own, "horizon")), np.array(column(own, "gap"))
        error = np.array(column(own, "gap_error"))
        color = style.COLORS[index % len(style.COLORS)]
        axis.plot(horizons, gap, "-", color=color, label=f"N = {budget:,}")
        axis.fill_between(horizons, gap - error, gap + error, color=color, alpha=0.2, lw=0)
        theory = stochastic_horizon(budget)
        axis.plot([theory], np.interp(np.log(theory), np.log(horizons), gap), "x", color=color, ms=8, mew=2)
    _finish(axis, "gap by horizon (noisy quadratic)", "horizon T", "F(w_avg) − F*")


def _finish(axis: Any, title: str, x: str, y: str) -> None:
    style.log_axis(axis, x)
    axis.set_yscale("log")
    axis.set_title(title, fontsize=10, color=style.INK)
    axis.set_ylabel(y, fontsize=9)
    style.legend_under(axis)


def _page(
    rows: Sequence[Row],
    theorem: Sequence[Drawing],
    growth: Sequence[Drawing],
    best: Best,
    fits: Sequence[Fit],
    folder: Path,
) -> Page:
    lead = [
        *verdict(compare_with_bounds(rows)),
        "Strongly convex problems with known constants: the paper's bounds compared with measurements, and the "
        "best horizon T for each budget N.",
    ]
    table = DataTable(*growth_table(best, fits), TABLE)
    sections = [
        PageSection("Bounds", pictures=_pictures(theorem)),
        PageSection("Best horizon", pictures=_pictures(growth), tables=[table]),
    ]
    title = "Bounds and horizons: theory and measurement"
    return Page(title, lead, sections, facts=environment.facts([folder]))
