"""Checkpoints: folders that are complete or absent. The last few are kept.

A checkpoint is a folder ``step-00001200`` with

- ``model.safetensors``: the parameters and buffers by name, for anyone to use;
- ``training.safetensors``: the tensors of the optimizer, of the mixer and of the random generators; with several
  processes a folder ``training`` of ``torch.distributed.checkpoint``
  (:mod:`mixwell.distributed.sharded_checkpoint`), which any world size can load;
- ``state.json``: everything that is not a tensor, and the checksums of the other files.

It is written under another name, flushed to the disk, and moved into place; older ones are removed after that. So
the last complete checkpoint survives the death of the process or the machine at any moment.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mixwell import distributed
from mixwell.distributed import sharded_checkpoint
from mixwell.utils import files
from mixwell.utils.parsing import parse_json
from mixwell.utils.regular_files import read_regular, regular_opener

MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"
SHARDS = "training"
FORMAT = 3
_PREFIX, _PART = "step-", ".part"
# Copies that a user has put there, such as step-00001200-good, are not ours.
_OURS = re.compile(rf"{_PREFIX}\d{{8,}}")


@final
@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume.

    Args:
        step: training steps done.
        model: the model's tensors by name.
        training: other tensors by name.
        plain: everything else, as JSON values.
        own: the values of each rank; before it is written, only this rank's.
        folder: holds tensors that are read when their sharding is known.
    """

    step: int
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    plain: dict[str, Any]
    own: list[Any] = field(default_factory=list[Any])
    folder: Path | None = None

    def tensors(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the training, sharded like ``like``; all ranks must call it."""
        if self.folder is None or not (self.folder / SHARDS).is_dir():
            return self.training
        return sharded_checkpoint.load_sharded(self.folder / SHARDS, like)

    def model_tensors(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the model, sharded like ``like``; all ranks must call it."""
        if self.folder is None or self.model:
            return self.model
        if not any(distributed.is_sharded(tensor) for tensor in like.values()):
            return load_file(self.folder / MODEL)
        # The folder has other files than the model's, too.
        return sharded_checkpoint.load_sharded(self.folder, like, only=like)


class DamagedError(ValueError):
    """A checkpoint cannot be read."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then remove all but the last ``keep``; all ranks must call it.

    Args:
        folder: holds the checkpoints, on a file system that all ranks see; created if it is missing.

    Raises:
        OSError: it could not be written; the checkpoints before it are untouched.
    """
    final_place = folder / f"{_PREFIX}{checkpoint.step:08d}"
    part = folder / (final_place.name + _PART)
    try:
        distributed.run_on_rank_zero(lambda: files.empty_folder(part))
        if distributed.is_single_process():
            save_file(_apart(checkpoint.training), part / TRAINING)
        else:
            sharded_checkpoint.save_sharded(part / SHARDS, checkpoint.training)
        model = _whole(checkpoint.model)
        own = [one for each in distributed.all_gather_object(checkpoint.own) for one in each]

        def finish() -> None:
            save_file(_apart(model), part / MODEL)
            written = sorted(path for path in part.rglob("*") if path.is_file())
            content = {
                "format": FORMAT,
                "step": checkpoint.step,
                "checksums": {path.relative_to(part).as_posix(): _checksum(path) for path in written},
                **checkpoint.plain,
                "processes": own,
            }
            (part / STATE).write_text(json.dumps(content) + "\n", encoding="utf-8")
            for path in (*part.rglob("*"), part):
                files.flush(path)
            shutil.rmtree(final_place, ignore_errors=True)
            os.replace(part, final_place)
            files.flush(folder)

        distributed.run_on_rank_zero(finish)
    except distributed.RankZeroError:
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise _explained(error, folder) from error
    if distributed.rank() == 0:
        for old in list_all(folder)[:-keep]:
            _remove(old)
    return final_place


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the full tensors on rank 0, nothing on the others."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # A collective, one tensor at a time: the full model may not fit on a device.
        gathered = distributed.full_tensor(tensor.detach())
        if distributed.rank() == 0:
            found[name] = gathered.cpu() if distributed.is_sharded(tensor) else gathered
    return found


def list_all(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if _OURS.fullmatch(path.name)]
    return sorted((path for path in found if (path / STATE).is_file()), key=_step)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint. No code from it is run.

    Raises:
        DamagedError: a file is missing, cut off, or was changed.
        ValueError: another version of mixwell wrote it.
    """
    verify_checkpoint(path)
    try:
        plain = parse_json(read_regular(path / STATE))
        del plain["checksums"], plain["format"]
        # With several processes each reads its shards, when their layout is known.
        model = load_file(path / MODEL) if distributed.is_single_process() else {}
        training = load_file(path / TRAINING) if (path / TRAINING).exists() else {}
        step, own = int(plain.pop("step")), plain.pop("processes")
        return Checkpoint(step, model, training, plain, own, path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error


def verify_checkpoint(path: Path) -> None:
    """Compare the files of a checkpoint with their checksums; rank 0 does it for all.

    Raises:
        DamagedError: a file is missing, cut off, or was changed.
        ValueError: another version of mixwell wrote it.
    """

    def problem() -> tuple[bool, str] | None:
        try:
            plain = parse_json(read_regular(path / STATE))
            for name, expected in plain["checksums"].items():
                if _checksum(path / name) != expected:
                    return True, f"{path / name} is damaged: its checksum is wrong"
            version = plain["format"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return True, f"{path} is damaged: {error}"
        if version != FORMAT:
            return False, f"{path} has format {version}, this version of mixwell reads format {FORMAT}"
        return None

    found = distributed.run_on_rank_zero(problem)
    if found is not None:
        damaged, message = found
        raise DamagedError(message) if damaged else ValueError(message)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that can be read (``None`` if there is none), and the problems of newer ones.

    Raises:
        DamagedError: there are checkpoints, but none can be read.
    """
    wrong: list[str] = []
    for path in reversed(list_all(folder)):
        try:
            return read_checkpoint(path), wrong
        except DamagedError as error:
            wrong.append(str(error))
    if wrong:
        raise DamagedError(
            f"no checkpoint in {folder} can be read ({'; '.join(wrong)}); remove them to start from the beginning"
        )
    return None, wrong


def tidy(folder: Path, *, after: int | None = None) -> None:
    """Remove unfinished checkpoints of a dead process, and those after a step, which could not be read."""
    whole = list_all(folder)
    for path in folder.glob(f"{_PREFIX}*"):
        if path not in whole and _OURS.fullmatch(path.name.removesuffix(_PART)):
            shutil.rmtree(path, ignore_errors=True)
    for path in whole:
        if after is not None and _step(path) > after:
            _remove(path)


def unique(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once, under its first name: safetensors refuses tied weights."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = (distributed.to_local(tensor).data_ptr(), tuple(tensor.shape), tensor.stride())
        if distributed.to_local(tensor).numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of a checkpoint, which has tied weights under their first name only.

    Raises:
        ValueError: names or shapes differ.
    """
    expected = unique(model.state_dict())
    wrong = sorted(set(expected) ^ set(tensors))
    wrong += [n for n in expected if n in tensors and expected[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"the checkpoint is of another model; it differs in {', '.join(wrong[:5])}")
    model.load_state_dict(dict(tensors), strict=False)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with separate storages: safetensors refuses views of one."""
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
    (path / STATE).unlink(
        missing_ok=True
    )  # first, so that a half-removed one is not taken for a complete one
    shutil.rmtree(path, ignore_errors=True)


def _checksum(path: Path) -> str:
    with open(path, "rb", opener=regular_opener) as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _explained(error: OSError | SafetensorError, folder: Path) -> OSError:
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number is not None else str(error)
    advice = "the checkpoints before it are untouched"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        advice += "; make room, then continue with `mixwell resume`"
    return OSError(f"cannot write a checkpoint to {folder} ({reason}); {advice}")
