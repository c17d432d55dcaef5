"""A comparison as a table of texts and one verdict, for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mixwell.lab.compare.standings import NOT_FINITE, UNIFORM, Standing, loss_column, of_method, standings
from mixwell.lab.tables import Row
from mixwell.utils.bidi import isolate
from mixwell.utils.intervals import Interval

LARGEST = 3
"""Number of weights in a cell."""


def summary(found: Sequence[Standing]) -> list[dict[str, str]]:
    """Return a row of cells by heading for each entry, in the given order."""
    return [
        {
            "method": one.name,
            "rank": str(one.rank),
            "vs. best": one.status,
            "kind": one.kind,
            "T": "" if one.horizon is None else f"{one.horizon:,}",
            "loss": format_loss(one.mean)
            + ("" if math.isnan(one.deviation) else f" ± {format_loss(one.deviation)}"),
            "vs. uniform": "" if one.to_uniform is None else format_difference(one.to_uniform),
            "compute": _number(one.compute),
            "steps": format_steps(one),
            "seconds": _number(one.seconds, digits=1),
            "MiB": _number(one.memory / 2**20, digits=1),
            "weights": _largest(one.weights),
        }
        for one in found
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Return which entry has the lowest loss, and how it compares with uniform weights."""
    found, (_, label) = standings(rows), loss_column(rows)
    best, uniform = found[0], of_method(found, UNIFORM)
    if not math.isfinite(best.mean):
        return f"No method has a finite {label}."
    seeds = len(best.losses)
    text = f"{isolate(best.name)} has the lowest mean {label} of {len(found)} method{'s'[: len(found) - 1]}"
    text += f", {format_loss(best.mean)} over {seeds} seed{'s'[: seeds - 1]}"
    if uniform is not None and best.to_uniform is not None:
        text += f"; compared with uniform weights {format_difference(best.to_uniform)}"
        if best.to_uniform.count > 1:
            lower = sum(loss < uniform.losses.get(seed, -math.inf) for seed, loss in best.losses.items())
            text += f" (95%, paired by seed), lower in {lower} of {best.to_uniform.count} seeds"
    if trained_less(best):
        text += f"; it trained {format_steps(best)} steps and paid for validation and trials with the rest"
    return f"{text}." if seeds > 1 else f"{text}. One seed cannot tell this from chance."


def format_steps(one: Standing) -> str:
    """Return the steps of the last run, such as ``152 of 200`` where compute for other purposes took the rest."""
    return f"{_number(one.steps)} of {_number(one.budget)}" if trained_less(one) else _number(one.steps)


def trained_less(one: Standing) -> bool:
    """Return whether an entry trained fewer steps than its budget, because of what else it computes."""
    return math.isfinite(one.budget) and round(one.steps) < round(one.budget)


def format_loss(value: float) -> str:
    """Return a loss with four decimals, or four digits if it is large."""
    if not math.isfinite(value):
        return NOT_FINITE
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def format_difference(found: Interval) -> str:
    """Return a paired difference such as ``-0.1590 [-0.2050, -0.1130]``; only the mean without an interval."""
    if not math.isfinite(found.mean):
        return NOT_FINITE if found.count else "no seed in common"
    mean, low, high = (("+" if v >= 0 else "") + format_loss(v) for v in (found.mean, found.low, found.high))
    return mean if math.isnan(found.low) else f"{mean} [{low}, {high}]"


def _number(value: float, *, digits: int = 0) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.{digits}f}" if 0 < value < 9.95 else f"{value:,.0f}"


def _largest(weights: Mapping[str, float]) -> str:
    if not weights or any(math.isnan(weight) for weight in weights.values()):
        return ""
    if len(weights) > 1 and max(weights.values()) - min(weights.values()) < 1e-6:
        return f"all {next(iter(weights.values())):.1%}"
    names = sorted(weights, key=weights.__getitem__, reverse=True)[:LARGEST]
    return ", ".join(f"{isolate(name)} {weights[name]:.0%}" for name in names)
