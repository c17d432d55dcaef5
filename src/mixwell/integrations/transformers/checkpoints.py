"""What a checkpoint of ``Trainer`` carries of mixing, for each process: the mixer, and the place in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixwell import files
from mixwell.data.readers import Place
from mixwell.mixer import Mixer


def write(folder: Path, process: Place, mixer: Mixer, plain: dict[str, Any]) -> None:
    """Add to a checkpoint.

    Args:
        folder: of the checkpoint.
        process: which one this is.
        mixer: of the run, between two steps.
        plain: where the data are.
    """
    rank, processes = process
    folder.mkdir(parents=True, exist_ok=True)
    mixer.save(folder / f"mixer-{rank}.safetensors")
    files.write(folder / f"mixing-{rank}.json", json.dumps({**plain, "processes": processes}))


def read(folder: Path, process: Place, mixer: Mixer) -> dict[str, Any]:
    """Take up a mixer.

    Args:
        folder: of the checkpoint.
        process: which one this is.
        mixer: a new one, with the same settings.

    Returns:
        Where the data were.

    Raises:
        ValueError: the checkpoint has none of it, or is of other processes or settings.
    """
    rank, processes = process
    try:
        plain = json.loads((folder / f"mixing-{rank}.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no mixing-{rank}.json: it was not saved by a MixedTrainer with so many processes, "
            "or saving was cut off; take an older checkpoint"
        ) from error
    if plain["processes"] != processes:
        raise ValueError(
            f"{folder} was saved by {plain['processes']} processes, and there are {processes}; start as many"
        )
    try:
        mixer.load(folder / f"mixer-{rank}.safetensors")
    except ValueError as error:
        raise ValueError(
            f"{error}\nTake the settings that it was saved with. To train longer, or otherwise, begin a new "
            "run from the checkpoint's model, with mixer={'weights': ...} as its mixture.json has them"
        ) from error
    return plain
