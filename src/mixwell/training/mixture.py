"""``mixture.json``: the mixture that was learned, and what made it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from mixwell import environment, files
from mixwell.mixer import Mixer
from mixwell.training.config import Config

FILE = "mixture.json"
FORMAT = 1


def describe(config: Config, mixer: Mixer, *, rows: dict[str, int], taken: dict[str, int]) -> dict[str, Any]:
    """The artefact, as plain values.

    Args:
        config: the settings.
        mixer: of the run.
        rows: that each domain has.
        taken: rows that were trained on, by domain.

    Returns:
        What :func:`schema` describes.
    """
    weights = mixer.weights
    return {
        "format": FORMAT,
        "domains": list(weights.names),
        "weights": {"last": weights.last, "average": weights.average},
        "history": [
            {"step": step, "weights": dict(zip(weights.names, row.tolist(), strict=True))}
            for step, row in zip(_steps(mixer), weights.history, strict=True)
        ],
        "method": config.mixer.method,
        "horizon": mixer.horizon,
        "budget": config.steps,
        "steps_done": mixer.steps_done,
        "finished": mixer.steps_done >= config.steps and not mixer.round_done,
        "seed": config.seed,
        "rows": {"available": rows, "trained_on": taken},
        "made_with": environment.describe()["packages"],
    }


def write(folder: Path, described: dict[str, Any]) -> None:
    """Write the artefact of a run.

    Args:
        folder: of the run.
        described: what :func:`describe` gave.
    """
    files.write(folder / FILE, json.dumps(described, indent=1) + "\n")


def schema() -> dict[str, Any]:
    """The JSON schema of the artefact."""
    return json.loads(resources.files("mixwell.training").joinpath("mixture.schema.json").read_text("utf-8"))


def _steps(mixer: Mixer) -> list[int]:
    """The step from which each of the weights was used."""
    return [0, *(record.first_step + record.steps for record in mixer.rounds)]
