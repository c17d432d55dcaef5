"""Check the theorems' inequalities on the measurements, and whether they are informative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import final

import numpy as np

from mixwell.lab.bounds.cells import KINDS
from mixwell.lab.tables import Row, column


@final
@dataclass(frozen=True)
class BoundCheck:
    """Measurements of one kind of problems compared with their bounds.

    Args:
        rows: number of measurements.
        gap: the largest ratio of ``F(w_avg) - F*`` to its bound.
        error: the largest ratio of a round's hypergradient error to its bound; NaN with noise.
        informative: rows in which the bound is below ``max_w F(w) - F*``; elsewhere nothing could violate it.
        fading: the slowest decay of the error with the horizon, relative to the bound's decay per step (at least 1
            is right); NaN except for exact curvature, since only there the error has no other part.
        nonconvex: number of problems in which F is not convex, as the theorems require.
    """

    kind: str
    noisy: bool
    curvature: str
    rows: int
    gap: float
    error: float
    informative: int
    fading: float
    nonconvex: int

    @property
    def holds(self) -> bool:
        """Whether every inequality holds; NaN does not."""
        right = self.gap <= 1 and (self.noisy or self.error <= 1)
        return right and (math.isnan(self.fading) or self.fading >= 1)


def compare_with_bounds(rows: Sequence[Row]) -> list[BoundCheck]:
    """Compare all theorem rows with their bounds, for each kind, noise and curvature."""
    theorem = [row for row in rows if row["purpose"] == "theorem"]
    found: list[BoundCheck] = []
    for kind, noisy, curvature in dict.fromkeys((r["kind"], r["noisy"], r["curvature"]) for r in theorem):
        own = [r for r in theorem if (r["kind"], r["noisy"], r["curvature"]) == (kind, noisy, curvature)]
        seeds = sorted({int(r["seed"]) for r in own})
        found.append(
            BoundCheck(
                kind=str(kind),
                noisy=bool(noisy),
                curvature=str(curvature),
                rows=len(own),
                gap=float(np.max(np.array(column(own, "gap")) / np.array(column(own, "bound")))),
                error=math.nan if noisy else float(np.max(column(own, "error_ratio"))),
                informative=sum(float(r["bound"]) < greatest_gap(str(kind), int(r["seed"])) for r in own),
                fading=_fading(own) if curvature == "exact" and not noisy else math.nan,
                nonconvex=sum(not is_convex(str(kind), seed) for seed in seeds),
            )
        )
    return found


def verdict(checks: Sequence[BoundCheck]) -> list[str]:
    """Return a summary of the checks in sentences."""
    rows, informative = sum(c.rows for c in checks), sum(c.informative for c in checks)
    broken = [f"{c.kind}, {c.curvature}" for c in checks if not c.holds]
    holds = f"they do NOT hold for {'; '.join(broken)}" if broken else "they all hold"
    lines = [
        f"The theorems' inequalities were compared with {rows} measurements: {holds}. In {informative} of them "
        "the bound of F(w_avg) - F* is below the largest gap of any weights; elsewhere it is not informative."
    ]
    fading = [c.fading for c in checks if not math.isnan(c.fading)]
    if fading:
        lines.append(
            "With exact curvature the hypergradient's error falls with the horizon at least "
            f"{min(fading):.2f} times as fast as (1 - eta mu / 2)^T promises (below 1 would be a failure)."
        )
    nonconvex = sum(c.nonconvex for c in checks)
    if nonconvex:
        lines.append(f"The theorems ask for a convex F; in {nonconvex} of the compared problems it is not.")
    return lines


@cache
def greatest_gap(kind: str, seed: int) -> float:
    """Return ``max_w F(w) - F*`` of a problem."""
    return KINDS[kind](seed).greatest_gap()


@cache
def is_convex(kind: str, seed: int) -> bool:
    """Return whether F of a problem is convex on the chords of a grid."""
    return KINDS[kind](seed).convexity_violations()[0] == 0


def _fading(rows: Sequence[Row]) -> float:
    """Return the slowest ``log(error_1 / error_2) / log(bound_1 / bound_2)`` of neighboring horizons.

    Only the bound's exponential part is taken, with its factor ``eta T``; pairs with errors below rounding are
    left out.
    """
    slowest = math.inf
    for seed, budget in sorted({(int(r["seed"]), int(r["budget"])) for r in rows}):
        own = sorted(
            (r for r in rows if (r["seed"], r["budget"]) == (seed, budget)), key=lambda r: r["horizon"]
        )
        mu = KINDS[str(own[0]["kind"])](seed).base_constants(noisy=False).strong_convexity
        for one, two in pairwise(own):
            first, second = float(one["error"]), float(two["error"])
            if second <= 0:
                continue
            steps = float(two["horizon"]) - float(one["horizon"])
            promised = -steps * math.log1p(-float(one["learning_rate"]) * mu / 2)
            promised -= math.log(float(two["horizon"]) / float(one["horizon"]))
            if promised > 0:
                slowest = min(slowest, math.log(first / second) / promised)
    return slowest if math.isfinite(slowest) else math.nan
