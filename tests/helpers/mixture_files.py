"""Mixtures as runs leave them, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mixture(
    average: Mapping[str, float],
    *,
    last: Mapping[str, float] | None = None,
    rows: Mapping[str, int] | None = None,
    finished: bool = True,
) -> dict[str, Any]:
    """The content of a `mixture.json` with these weights."""
    last = dict(average if last is None else last)
    available = dict.fromkeys(average, 1000) if rows is None else dict(rows)
    return {
        "format": 1,
        "domains": list(average),
        "weights": {"last": last, "average": dict(average)},
        "history": [{"step": 0, "weights": last}],
        "method": "hypergradient",
        "horizon": 84,
        "budget": 1000,
        "steps_done": 1000 if finished else 120,
        "finished": finished,
        "seed": 0,
        "rows": {"available": available, "trained_on": dict.fromkeys(average, 10)},
        "made_with": {"mixwell": "0"},
    }
