"""Checkpoints: folders that are there whole or not at all, the last few of which are kept.

A checkpoint is a folder ``step-00001200`` with

- ``model.safetensors``: the parameters and buffers by name, for anyone to use;
- ``training.safetensors``: the tensors of the optimizer, of the mixer and of the random generators; of several
  processes a folder ``training``, through ``torch.distributed.checkpoint``
  (:mod:`mixwell.distributed.sharded_checkpoint`), which any
  world size can load;
- ``state.json``: everything that is no tensor, and the checksums of the other files.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mixwell import distributed
from mixwell.distributed import sharded_checkpoint
from mixwell.utils import files
from mixwell.utils.sections import ConfigSection, Whole

MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"
SHARDS = "training"
FORMAT = 3
_PREFIX, _PART = "step-", ".part"
# Copies that a user has put there, such as step-00001200-good, are not ours.
_OURS = re.compile(rf"{_PREFIX}\d{{8,}}")


class OutputConfig(ConfigSection):
    """Intervals of logging, evaluations and checkpoints."""

    log_every: Whole = 10
    """Steps between two lines of metrics."""
    evaluate_every: Whole | Literal["auto"] = "auto"
    """Steps between two evaluations; `auto` is a twentieth of all."""
    evaluate_rows: Whole = 512
    """The greatest number of rows of the validation set (and of the test set) that an evaluation takes."""
    checkpoint_every: Whole | Literal["auto"] = "auto"
    """Steps between two checkpoints; `auto` is about every two minutes."""
    keep: Whole = 2
    """Checkpoints that are kept."""


@final
@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to resume.

    Args:
        step: training steps done.
        model: the model's tensors by name.
        training: other tensors by name.
        plain: everything else, as JSON has it.
        own: what each process keeps of it for itself; in one that is to be written, only this one's.
        folder: of tensors that are read when their sharding is known; ``None`` where there are none.
    """

    step: int
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    plain: dict[str, Any]
    own: list[Any] = field(default_factory=list[Any])
    folder: Path | None = None

    def tensors(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the training; all processes must call it.

        Args:
            like: tensors by name that are sharded as the result should be.
        """
        if self.folder is None or not (self.folder / SHARDS).is_dir():
            return self.training
        return sharded_checkpoint.load_sharded(self.folder / SHARDS, like)

    def model_tensors(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model; all processes must call it."""
        if self.folder is None or self.model:
            return self.model
        if not any(distributed.is_sharded(tensor) for tensor in like.values()):
            return load_file(self.folder / MODEL)
        # Other files may lie beside that of the model.
        return sharded_checkpoint.load_sharded(self.folder, like, only=like)


class DamagedError(ValueError):
    """A checkpoint cannot be read."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then remove those that are older than the last ``keep``; all processes must call it.

    Args:
        folder: of the checkpoints, on a file system that all processes see; made if it is missing.
        keep: how many stay, this one included.

    Raises:
        OSError: it could not be written, with what to do; the checkpoints before it are untouched.
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
    """What a file for anyone holds; in the first process, and nothing in the others."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = distributed.full_tensor(tensor.detach())  # one at a time, all must do it
        if distributed.rank() == 0:
            found[name] = gathered.cpu() if distributed.is_sharded(tensor) else gathered
    return found


def list_all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
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
        plain = json.loads((path / STATE).read_text(encoding="utf-8"))
        del plain["checksums"], plain["format"]
        # Of several processes each reads its own part, when it is known what that is.
        model = load_file(path / MODEL) if distributed.is_single_process() else {}
        training = load_file(path / TRAINING) if (path / TRAINING).exists() else {}
        step, own = int(plain.pop("step")), plain.pop("processes")
        return Checkpoint(step, model, training, plain, own, path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error


def verify_checkpoint(path: Path) -> None:
    """See that all files of a checkpoint are as they were written; the first process does it for all.

    Raises:
        DamagedError: a file is missing, cut off, or was changed.
        ValueError: another version of mixwell wrote it.
    """

    def problem() -> tuple[bool, str] | None:
        try:
            plain = json.loads((path / STATE).read_text(encoding="utf-8"))
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
    """The newest checkpoint that can be read.

    Returns:
        The checkpoint, ``None`` where there is none; and what is wrong with newer ones.

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
    """Remove what a dead process left half-written, and checkpoints beyond a step.

    Args:
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

    Returns:
        Each once, under its first name.
    """
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


def _explained(error: OSError | SafetensorError, folder: Path) -> OSError:
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number is not None else str(error)
    advice = "the checkpoints before it are untouched"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in reason:
        advice += "; make room, then continue with `mixwell resume`"
    return OSError(f"cannot write a checkpoint to {folder} ({reason}); {advice}")
