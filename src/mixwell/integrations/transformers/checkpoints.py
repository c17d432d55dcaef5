"""What a checkpoint of ``Trainer`` carries of mixing: the mixer, and the place in the data of each process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mixwell import distributed
from mixwell.distributed import sharded_checkpoint
from mixwell.mixer.mixer import Mixer
from mixwell.utils import files

ALONE, TOGETHER = "mixer.safetensors", "mixer"
PLACES = "mixing.json"


def write(folder: Path, mixer: Mixer, plain: dict[str, Any]) -> None:
    """Add to a checkpoint; all processes must call it.

    Args:
        folder: of the checkpoint, on a file system that all processes see.
        plain: where the data of this process are, and whether there are ``streams`` among them.
    """
    places = distributed.all_gather_object(plain)
    distributed.run_on_rank_zero(lambda: _make_room(folder))
    mixer.save(folder / (ALONE if distributed.is_single_process() else TOGETHER))
    # The last to be written, so that where it is the others are whole.
    distributed.run_on_rank_zero(
        lambda: files.write_atomically(folder / PLACES, json.dumps({"processes": places}))
    )


def read_places(folder: Path) -> dict[str, Any]:
    """Read where the data were.

    Returns:
        The place of this process, or of all processes together where their number is another now.

    Raises:
        ValueError: the checkpoint has none of it, or is of another number of processes that read streams.
    """
    return _own(_places(folder), folder)


def load_mixer(folder: Path, mixer: Mixer) -> None:
    """Take up a mixer, whatever the number of processes that saved it; all must call it.

    Args:
        mixer: a new one, with the same settings.

    Raises:
        ValueError: the checkpoint has none, or is of other settings.
    """
    try:
        mixer.load(folder / (ALONE if len(_places(folder)) == 1 else TOGETHER))
    except ValueError as error:
        raise ValueError(
            f"{error}\nTake the settings that it was saved with. To train longer, or otherwise, begin a new "
            "run from the checkpoint's model, with mixer={'weights': ...} as its mixture.json has them"
        ) from error


def _places(folder: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((folder / PLACES).read_text(encoding="utf-8"))["processes"]
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no mixing.json: it was not saved by a MixerTrainer, or saving was cut off; take an "
            "older checkpoint"
        ) from error


def _own(places: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    if len(places) == distributed.world_size():
        return places[distributed.rank()]
    if places[0]["streams"]:
        raise ValueError(
            f"{folder} was saved by {len(places)} processes, and there are {distributed.world_size()}; each reads "
            "its own part of a stream, so start as many"
        )
    # Rows that have numbers are drawn by all processes together; only the sums of losses are of each one's rows.
    return {**places[0], "losses": sharded_checkpoint.merge_rank_states([one["losses"] for one in places])}


def _make_room(folder: Path) -> None:
    """Take away what another number of processes may have left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLACES).unlink(missing_ok=True)
    (folder / ALONE).unlink(missing_ok=True)
    shutil.rmtree(folder / TOGETHER, ignore_errors=True)
