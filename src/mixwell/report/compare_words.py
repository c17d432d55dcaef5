"""What a comparison of methods says, in words and in a table of texts, for pages and for terminals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mixwell.lab.intervals import Interval
from mixwell.lab.tables import Row
from mixwell.report.standings import (
    NOISE,
    NOT_FINITE,
    UNIFORM,
    Pair,
    Standing,
    loss_column,
    of_method,
    pairs,
    standings,
)

HEADINGS = (
    "arm",
    "rank",
    "beside the best",
    "kind",
    "T",
    "loss",
    "against uniform",
    "compute",
    "steps",
    "seconds",
    "MiB",
    "weights",
)
"""Of :func:`summary`. The name is the first, since pages keep the first column in sight."""
NAMED = 6
GREATEST = 3
LONGEST = 15
OVER = 1.01


def summary(rows: Sequence[Row], weights: Sequence[Row] = ()) -> list[list[str]]:
    """The comparison as a table of texts.

    Args:
        rows: of the table of runs.
        weights: of the table of weights.

    Returns:
        A row for each arm, the best first, with the columns of :data:`HEADINGS`.
    """
    return [
        [
            one.arm,
            str(one.rank),
            one.beside_best,
            one.kind,
            "" if one.horizon is None else f"{one.horizon:,}",
            written(one.mean) + ("" if math.isnan(one.spread) else f" ± {written(one.spread)}"),
            "" if one.to_uniform is None else difference(one.to_uniform),
            _count(one.compute),
            _count(one.steps),
            _short(one.seconds),
            _short(one.memory / 2**20),
            _greatest(one.weights),
        ]
        for one in standings(rows, weights)
    ]


def findings(rows: Sequence[Row]) -> list[str]:
    """What the comparison says, and what it cannot say.

    Args:
        rows: of the table of runs.

    Returns:
        Sentences, the most important first.
    """
    found = standings(rows)
    seeds = len({seed for one in found for seed in one.losses})
    said = [_best_words(found, loss_column(rows)[1], seeds)]
    if seeds > 1 and math.isfinite(found[0].mean):
        said += _noise_words(found)
    said += _uniform_words(found)
    said += _horizon_words(pairs(found))
    said += _care_words(found, seeds)
    return said


def written(value: float) -> str:
    """A loss as a text.

    Args:
        value: the loss.

    Returns:
        Four digits after the point, fewer of great numbers, and words where it is not finite.
    """
    if not math.isfinite(value):
        return NOT_FINITE
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def difference(found: Interval) -> str:
    """A paired difference as a text.

    Args:
        found: mean and interval.

    Returns:
        Such as ``-0.1590 [-0.2050, -0.1130]``; the mean alone where there is no interval.
    """
    if not math.isfinite(found.mean):
        return NOT_FINITE if found.count else "no seed in common"
    mean, low, high = (("+" if v >= 0 else "") + written(v) for v in (found.mean, found.low, found.high))
    return mean if math.isnan(found.low) else f"{mean} [{low}, {high}]"


def some(names: Sequence[str], most: int = NAMED) -> str:
    """Names in a sentence.

    Args:
        names: all of them.
        most: so many are named, and the others counted.

    Returns:
        The names.
    """
    between = "; " if any("," in name for name in names) else ", "
    if len(names) <= most + 1:  # to count a single one takes as much room as its name
        return between.join(names)
    return f"{between.join(names[:most])} and {len(names) - most} others"


def _best_words(found: Sequence[Standing], label: str, seeds: int) -> str:
    best = found[0]
    if not math.isfinite(best.mean):
        return f"No arm has a finite {label}."
    own = len(best.losses)
    over = "in the one seed" if seeds == 1 else f"over {own} seed{'s' if own > 1 else ''}"
    words = f"The least mean {label} of {len(found)} arms is {written(best.mean)} {over}, of {best.arm}"
    if seeds == 1:
        words = words.replace("least mean", "least")
    if best.method == UNIFORM:
        return f"{words}: nothing had a lower one than uniform weights."
    if best.to_uniform is None or not math.isfinite(best.to_uniform.mean):
        return f"{words}."
    words += f"; against uniform weights it is {difference(best.to_uniform)}"
    base = of_method(found, UNIFORM)
    if base is None or best.to_uniform.count < 2:
        return f"{words}."
    lower = sum(loss < base.losses.get(seed, -math.inf) for seed, loss in best.losses.items())
    words = f"{words} (95%, paired), lower in {lower} of {best.to_uniform.count} seeds"
    return f"{words}, which noise can explain." if 0.0 in best.to_uniform else f"{words}."


def _noise_words(found: Sequence[Standing]) -> list[str]:
    """Which arms cannot be told from the best."""
    near = [one.arm for one in found if one.beside_best == NOISE]
    unknown = [one.arm for one in found if not one.beside_best]
    said: list[str] = []
    if near:
        said.append(
            f"Within its noise (the 95% interval of the paired difference contains zero): {some(near)}."
        )
    elif len(found) > 1 and not unknown:
        said.append("No other arm is within its noise.")
    if unknown:
        said.append(f"Too few seeds in common with it to tell: {some(unknown)}.")
    return said


def _uniform_words(found: Sequence[Standing]) -> list[str]:
    against = {one.arm: one.to_uniform for one in found if one.to_uniform is not None}
    if not against:
        return []
    known = {arm: one for arm, one in against.items() if not math.isnan(one.low)}
    if not known:
        higher = [arm for arm, one in against.items() if one.mean > 0]
        return [
            f"A greater loss than uniform weights: {some(higher)}."
            if higher
            else "No arm has a greater loss than uniform weights."
        ]
    better = sum(one.high < 0 for one in known.values())
    worse = [arm for arm, one in known.items() if one.low > 0]
    apart = (
        f"Of {len(known)} other arm{'s' if len(known) > 1 else ''}, {better} did better than uniform weights"
    )
    apart += f" beyond the noise, {len(known) - better - len(worse)} cannot be told from them, "
    return [apart + (f"{len(worse)} did worse: {some(worse)}." if worse else "none did worse.")]


def _horizon_words(made: Sequence[Pair]) -> list[str]:
    if not made:
        return []
    shortest = {pair.arms[0].horizon for pair in made}
    short = f"T = {next(iter(shortest))}" if len(shortest) == 1 else "its shortest one"
    better = sum(pair.longer_is_better for pair in made)
    several = "s" if len(made) > 1 else ""
    words = (
        f"The longest horizon of a method had a lower mean loss than {short} in {better} of {len(made)} "
        f"method{several}"
    )
    if all(math.isnan(pair.change.low) for pair in made):
        return [f"{words}."]
    up, down = sum(pair.change.low > 0 for pair in made), sum(pair.change.high < 0 for pair in made)
    return [f"{words}; beyond the noise it was lower in {down} and higher in {up}."]


def _care_words(found: Sequence[Standing], seeds: int) -> list[str]:
    said: list[str] = []
    if seeds == 1:
        said.append("One seed: any of these differences may be chance.")
    elif len(found) > 2 and math.isfinite(found[0].mean):
        said.append("The best was picked by these same runs, so its lead is likely to be less in new ones.")
    fewer = [f"{one.arm} ({len(one.losses)} of {seeds})" for one in found if len(one.losses) < seeds]
    if fewer:
        said.append(f"Fewer seeds, so that means are not of the same ones: {some(fewer)}.")
    lost = [one.arm for one in found if not math.isfinite(one.mean)]
    if lost and len(lost) < len(found):
        said.append(f"A loss that is not finite: {some(lost)}.")
    over = [
        f"{one.arm} ({one.compute / one.budget:.2f}x)" for one in found if one.compute > OVER * one.budget
    ]
    if over:
        said.append(f"More compute than was allowed: {some(over)}.")
    return said


def _count(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}"


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}" if value >= 9.95 or value == 0 else f"{value:.1f}"


def _greatest(weights: Mapping[str, float]) -> str:
    """The greatest weights, in few words."""
    if not weights or any(math.isnan(weight) for weight in weights.values()):
        return ""
    if len(weights) > 1 and max(weights.values()) - min(weights.values()) < 1e-6:
        return f"all {next(iter(weights.values())):.1%}"
    names = sorted(weights, key=weights.__getitem__, reverse=True)[:GREATEST]
    return ", ".join(f"{_ends(name)} {weights[name]:.0%}" for name in names)


def _ends(name: str) -> str:
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}"
