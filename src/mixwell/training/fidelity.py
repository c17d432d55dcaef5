"""Is the estimate of the hypergradient any good on the model of a run?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixwell.reference.fidelity import Fidelity
from mixwell.utils import files

FILE = "fidelity.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The measurements that were made on a run.

    Args:
        folder: the run's directory.

    Returns:
        One for each; none where none was made.
    """
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def add(folder: Path, step: int, measured: Fidelity) -> None:
    """Keep a measurement beside the run.

    Args:
        folder: the run's directory.
        step: training steps done before it.
        measured: what was measured.
    """
    line: dict[str, Any] = {
        "step": step,
        "horizon": measured.horizon,
        "cosine": measured.cosine,
        "sign_agreement": measured.sign_agreement,
        "rank_agreement": measured.rank_agreement,
        "relative_error": measured.relative_error,
        "estimate": dict(zip(measured.domains, measured.estimate.tolist(), strict=True)),
        "exact": dict(zip(measured.domains, measured.exact.tolist(), strict=True)),
        "verdict": measured.verdict(),
    }
    if measured.replication is not None:
        found = measured.replication
        line["replication"] = {
            "replicates": len(found.estimates),
            "agreement": found.agreement,
            "worst": found.worst,
            "effect": dict(zip(measured.domains, found.effect.tolist(), strict=True)),
            "effect_cosine": found.effect_cosine,
        }
    files.write_atomically(folder / FILE, json.dumps([*read(folder), line], indent=1) + "\n")
