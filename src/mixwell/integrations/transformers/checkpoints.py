"""Checkpoints of ``MixerTrainer``: the mixer, and the place in the data of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mixwell import distributed
from mixwell.distributed import sharded_checkpoint
from mixwell.mixer.mixer import Mixer
from mixwell.utils import checksums, files

ALONE, TOGETHER = "mixer.safetensors", "mixer"
PLACES = "mixing.json"


def write_checkpoint(folder: Path, mixer: Mixer, plain: dict[str, Any]) -> None:
    """Add to a checkpoint; all processes must call it.

    Args:
        folder: of the checkpoint, on a file system that all processes see.
        plain: the place in the data of this process, and whether there are ``streams`` among them.
    """
    places = distributed.all_gather_object(plain)
    distributed.run_on_rank_zero(lambda: _remove_earlier(folder))
    mixer.save(folder / (ALONE if distributed.is_single_process() else TOGETHER))
    # Written last, so that where it exists the others are complete.
    distributed.run_on_rank_zero(
        lambda: files.write_atomically(folder / PLACES, checksums.sealed({"processes": places}))
    )


def read_places(folder: Path) -> dict[str, Any]:
    """Return the place in the data of this process, or that of all processes if their number has changed."""
    places = _places(folder)
    if len(places) == distributed.world_size():
        return places[distributed.rank()]
    if places[0]["streams"]:
        raise ValueError(
            f"{folder} was saved by {len(places)} processes, and there are {distributed.world_size()}; each reads "
            "its own part of a stream, so start as many"
        )
    # Rows that have numbers are drawn by all processes together; only the sums of losses are of each one's rows.
    return {**places[0], "losses": sharded_checkpoint.merge_rank_states([one["losses"] for one in places])}


def load_mixer(folder: Path, mixer: Mixer) -> None:
    """Load a new mixer of the same settings, from any number of processes that saved it; all must call it."""
    try:
        mixer.load(folder / (ALONE if len(_places(folder)) == 1 else TOGETHER))
    except ValueError as error:
        raise ValueError(
            f"{error}\nTake the settings that it was saved with. To train longer, or otherwise, begin a new "
            "run from the checkpoint's model, with mixer={'weights': ...} as its mixture.json has them"
        ) from error


def _places(folder: Path) -> list[dict[str, Any]]:
    if not (folder / PLACES).exists():
        raise ValueError(
            f"{folder} has no mixing.json: it was not saved by a MixerTrainer, or saving was cut off; take an "
            "older checkpoint"
        )
    return checksums.read_sealed(folder / PLACES)["processes"]


def _remove_earlier(folder: Path) -> None:
    """Remove files of another number of processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLACES).unlink(missing_ok=True)
    (folder / ALONE).unlink(missing_ok=True)
    files.remove_tree(folder / TOGETHER)
