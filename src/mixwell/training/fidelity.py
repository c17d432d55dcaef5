"""``fidelity.json``: measurements of the estimated hypergradient of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixwell.reference.fidelity import Fidelity
from mixwell.utils import files

FILE = "fidelity.json"


def read_measurements(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a run.

    Returns:
        One for each; none where none was made.
    """
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def add_measurement(folder: Path, step: int, measured: Fidelity) -> None:
    """Add a measurement to the run's directory."""
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
    files.write_atomically(folder / FILE, json.dumps([*read_measurements(folder), line], indent=1) + "\n")
