"""Checkpoints: folders that are there whole or not at all, the last few of which are kept.

A checkpoint is a folder ``step-00001200`` with

- ``model.safetensors``: the parameters and buffers by name, for anyone to use;
- ``training.safetensors``: the tensors of the optimiser, of the mixer and of the random generators;
- ``state.json``: everything that is no tensor, and the checksums of the two files.

It is written under another name, flushed to the disk, and moved into place; older ones are removed after that. So
whenever the process or the machine dies, the last whole checkpoint is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"
FORMAT = 1
_PREFIX, _PART = "step-", ".part"
# Copies that a user has put beside them, such as step-00001200-good, are not ours.
_OURS = re.compile(rf"{_PREFIX}\d{{8,}}")


@final
@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on.

    Args:
        step: training steps done.
        model: the model's tensors by name.
        training: other tensors by name.
        plain: everything else, as JSON has it.
    """

    step: int
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    plain: dict[str, Any]


class DamagedError(ValueError):
    """A checkpoint cannot be read."""


def write(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then remove those that are older than the last ``keep``.

    Args:
        folder: of the checkpoints; made if it is missing.
        checkpoint: what to write.
        keep: how many stay, this one included.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: it could not be written, with what to do; the checkpoints before it are untouched.
    """
    final_place = folder / f"{_PREFIX}{checkpoint.step:08d}"
    part = folder / (final_place.name + _PART)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, tensors in ((MODEL, checkpoint.model), (TRAINING, checkpoint.training)):
            save_file(_apart(tensors), part / name)
        plain = {
            "format": FORMAT,
            "step": checkpoint.step,
            "checksums": {name: _checksum(part / name) for name in (MODEL, TRAINING)},
            **checkpoint.plain,
        }
        (part / STATE).write_text(json.dumps(plain) + "\n", encoding="utf-8")
        for path in (*part.iterdir(), part):
            _flush(path)
        shutil.rmtree(final_place, ignore_errors=True)
        os.replace(part, final_place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise _explained(error, folder) from error
    for old in list_all(folder)[:-keep]:
        _remove(old)
    return final_place


def list_all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first.

    Args:
        folder: of the checkpoints.

    Returns:
        Their folders.
    """
    found = [path for path in folder.glob(f"{_PREFIX}*") if _OURS.fullmatch(path.name)]
    return sorted((path for path in found if (path / STATE).is_file()), key=_step)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. No code from it is run.

    Args:
        path: its folder.

    Returns:
        What was written.

    Raises:
        DamagedError: a file is missing, cut off, or was changed.
        ValueError: another version of mixwell wrote it.
    """
    try:
        plain = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, expected in plain["checksums"].items():
            if _checksum(path / name) != expected:
                raise DamagedError(f"{path / name} is damaged: its checksum is wrong")
        version = plain.pop("format")
        if version == FORMAT:
            del plain["checksums"]
            model, training = load_file(path / MODEL), load_file(path / TRAINING)
            return Checkpoint(int(plain.pop("step")), model, training, plain)
    except DamagedError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    raise ValueError(f"{path} has format {version}, this version of mixwell reads format {FORMAT}")


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read.

    Args:
        folder: of the checkpoints.

    Returns:
        The checkpoint, ``None`` where there is none; and what is wrong with newer ones.

    Raises:
        DamagedError: there are checkpoints, but none can be read.
    """
    wrong: list[str] = []
    for path in reversed(list_all(folder)):
        try:
            return read(path), wrong
        except DamagedError as error:
            wrong.append(str(error))
    if wrong:
        raise DamagedError(
            f"no checkpoint in {folder} can be read ({'; '.join(wrong)}); remove them to start from the beginning"
        )
    return None, wrong


def tidy(folder: Path, *, after: int | None = None) -> None:
    """Remove what a dead process left half-written, and checkpoints beyond a step.

    Args:
        folder: of the checkpoints.
        after: remove those of later steps, which could not be read; ``None`` for none.
    """
    whole = list_all(folder)
    for path in folder.glob(f"{_PREFIX}*"):
        if path not in whole and _OURS.fullmatch(path.name.removesuffix(_PART)):
            shutil.rmtree(path, ignore_errors=True)
    for path in whole:
        if after is not None and _step(path) > after:
            _remove(path)


def unique(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without second names for the same one (tied weights), which files cannot hold.

    Args:
        tensors: a model's, by name.

    Returns:
        Each once, under its first name.
    """
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the tensors of a checkpoint.

    Args:
        model: of the same shape as the one that was saved.
        tensors: by name; second names of tied weights are left out.

    Raises:
        ValueError: names or shapes do not fit.
    """
    expected = unique(model.state_dict())
    wrong = sorted(set(expected) ^ set(tensors))
    wrong += [n for n in expected if n in tensors and expected[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"the checkpoint is of another model; it differs in {', '.join(wrong[:5])}")
    model.load_state_dict(dict(tensors), strict=False)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own: a file cannot hold views of one storage."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        place = own.untyped_storage().data_ptr()
        found[name] = own.clone() if place in seen else own
        seen.add(place)
    return found


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _remove(path: Path) -> None:
    (path / STATE).unlink(missing_ok=True)  # first, so that a half-removed one is not taken for whole
    shutil.rmtree(path, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explained(error: OSError | SafetensorError, folder: Path) -> OSError:
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number is not None else str(error)
    advice = "the checkpoints before it are untouched"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        advice += "; make room, then continue with `mixwell resume`"
    return OSError(f"cannot write a checkpoint to {folder} ({reason}); {advice}")
