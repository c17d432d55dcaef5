"""The state of a mixer, and its file: safetensors, with plain values as JSON. Reading one runs no code from it.

Each has a checksum (:mod:`mixwell.utils.checksums`).

The state of several processes is a folder: their tensors (:mod:`mixwell.distributed.sharded_checkpoint`), and
their plain values in ``mixwell.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mixwell import distributed
from mixwell.distributed import sharded_checkpoint
from mixwell.mixer.round import RoundAccumulator
from mixwell.utils import checksums, files

FORMAT = 5
PLAIN = "mixwell.json"
# Tensors with one entry for each finished round.
GROWING = ("weights.history", "weights.steps")
State = dict[str, Any]
"""``{"format": int, "settings": {...}, "values": {...}, "tensors": {name: Tensor}}``"""


def capture(current: RoundAccumulator, clip_norm: float | None) -> State:
    """Return everything that a resumed run needs, with the live tensors."""
    values, tensors = current.signal.state()
    return {
        "format": FORMAT,
        "settings": _settings(current, clip_norm),
        "values": {
            "clock": current.clock.state(),
            "signal": values,
            "update": current.updater.update.state(),
            **current.state(),
        },
        "tensors": _named(current, tensors),
    }


def _settings(current: RoundAccumulator, clip_norm: float | None) -> dict[str, Any]:
    """Return what a state must have in common with the mixer that loads it."""
    return {
        "domains": list(current.weights.names),
        "horizon": current.clock.horizon,
        "budget": current.clock.budget,
        "warmup": current.clock.warmup,
        "clip_norm": clip_norm,
        "signal": repr(current.signal),
        "update": repr(current.updater.update),
        "constraints": repr(current.updater.constraints),
        "parameters": current.parameters.shapes(),
    }


def _named(current: RoundAccumulator, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the signal and of the weights by their names in a state."""
    history, steps = current.weights.state()
    named = {f"signal.{name}": tensor.detach() for name, tensor in tensors.items()}
    return named | {"weights.history": torch.from_numpy(history), "weights.steps": torch.from_numpy(steps)}


def restore(saved: Mapping[str, Any], current: RoundAccumulator, clip_norm: float | None) -> None:
    """Set everything to the result of :func:`capture`.

    Raises:
        ValueError: it is of another version or another run; nothing is changed.
    """
    _expect_same_run(saved, _settings(current, clip_norm), _named(current, current.signal.state()[1]))
    # Numbers of the steps that are undone; one that is not finite would end the run.
    current.readings.forget()
    tensors: dict[str, Tensor] = saved["tensors"]
    values: dict[str, Any] = saved["values"]
    own = {k.removeprefix("signal."): t for k, t in tensors.items() if k.startswith("signal.")}
    with torch.no_grad():
        current.signal.load_state(values["signal"], own)
    history, steps = (tensors[name].cpu().numpy() for name in GROWING)
    current.weights.load_state(history, steps)
    current.clock.load_state(values["clock"])
    current.updater.at_step(current.clock.round_start if values["rounds"] else 0)
    current.updater.update.load_state(values["update"])
    current.load_state(values)


def write_file(path: str | os.PathLike[str], state: State) -> None:
    """Write a state file; what was there before is replaced in one move, or kept if anything fails.

    Args:
        state: the result of ``Mixer.state_dict()``.
    """
    target = Path(path)
    plain = json.dumps({key: value for key, value in state.items() if key != "tensors"})
    tensors = {name: distributed.full_tensor(t.detach()).contiguous() for name, t in state["tensors"].items()}
    # As a tensor, since a header of safetensors has a limit that the records of many rounds would reach.
    tensors[PLAIN] = torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)
    tensors[checksums.TENSOR] = torch.zeros(32, dtype=torch.uint8)
    with _moved_away(target), files.replacing(target) as temporary:
        save_file(tensors, temporary)
        checksums.seal_safetensors(temporary)


def write_folder(path: str | os.PathLike[str], state: State) -> None:
    """Write the states of all processes into a folder; what was there before is replaced when all is written.

    Args:
        path: on a file system that all processes see.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    distributed.run_on_rank_zero(lambda: files.empty_folder(part))
    sharded_checkpoint.save_sharded(part, state["tensors"])
    plain = distributed.all_gather_object({key: value for key, value in state.items() if key != "tensors"})

    def finish() -> None:
        content = {"format": FORMAT, "checksums": checksums.folder_checksums(part), "processes": plain}
        files.write_atomically(part / PLAIN, checksums.sealed(content))
        for written in (*part.iterdir(), part):
            files.flush(written)
        with _moved_away(target):
            os.replace(part, target)

    distributed.run_on_rank_zero(finish)


def values_for_rank(plain: Sequence[State]) -> State:
    """Return the plain values with which this rank continues: its own, or merged ones in another world size."""
    if len(plain) == distributed.world_size():
        return plain[distributed.rank()]
    values = [dict(one["values"]) for one in plain]
    counts = [one.pop("skipped_in_round") for one in values]
    totals = [one.pop("skipped") for one in values]
    # All processes have the same totals but for this round, which they exchange when it ends.
    before = {name: total - counts[0].get(name, 0) for name, total in totals[0].items()}
    together = {name: sum(one.get(name, 0) for one in counts) for one in counts for name in one}
    here: dict[str, int] = {} if distributed.rank() else together
    skipped = {name: before.get(name, 0) + here.get(name, 0) for name in before | here}
    # A process that had no rows of a domain has a sum of zero, not none: it counts in the mean.
    seen = dict.fromkeys(name for one in values for name in one["losses"])
    for one in values:
        one["losses"] = {name: one["losses"].get(name, [0.0, 0.0]) for name in seen}
    return {
        **plain[0],
        "values": {
            **sharded_checkpoint.merge_rank_states(values),
            "skipped": {name: number for name, number in skipped.items() if number},
            "skipped_in_round": here,
        },
    }


def _read_folder(folder: Path, like: Mapping[str, Tensor]) -> State:
    def problem() -> str | None:
        try:
            checksums.verify_files(folder, checksums.read_sealed(folder / PLAIN, version=FORMAT)["checksums"])
        except (KeyError, ValueError) as error:
            return f"{folder} is not a state of mixwell, or it is damaged ({error})"
        return None

    # Rank 0 reads all files for the others, which read their own parts.
    found = distributed.run_on_rank_zero(problem)
    if found is not None:
        raise ValueError(found)
    plain = checksums.read_sealed(folder / PLAIN)["processes"]
    return {**values_for_rank(plain), "tensors": sharded_checkpoint.load_sharded(folder, like)}


@contextmanager
def _moved_away(target: Path) -> Generator[None]:
    """Make room for something new, and bring the old back where that fails."""
    old = target.with_name(target.name + ".old")
    files.remove_tree(old)
    if target.is_dir():
        os.replace(target, old)
    try:
        yield
    except BaseException:
        if old.is_dir() and not target.exists():
            os.replace(old, target)
        raise
    files.remove_tree(old)


def read(path: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> State:
    """Read a state file, or the folder of several processes.

    Args:
        like: tensors by name that show how a tensor is sharded here.

    Returns:
        The state for ``Mixer.load_state_dict``.
    """
    left = Path(path).with_name(Path(path).name + ".old")
    if not Path(path).exists() and left.is_dir():  # of a process that died while it replaced it
        path = left
    if Path(path).is_dir():
        return _read_folder(Path(path), like or {})
    try:
        checksums.verify_safetensors(Path(path))
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        del tensors[checksums.TENSOR]
        plain = json.loads(tensors.pop(PLAIN).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a state file of mixwell, or it is damaged ({error})") from error
    return {**values_for_rank([plain]), "tensors": tensors}


def _expect_same_run(
    state: Mapping[str, Any], settings: Mapping[str, Any], expected: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError that lists every difference if a state does not fit that of the mixer to load it."""
    if not {"format", "settings", "values", "tensors"} <= set(state):
        raise ValueError("this is not a state of mixwell.Mixer: give what state_dict() returned")
    if state["format"] != FORMAT:
        raise ValueError(
            f"the state has format {state['format']}, this version of mixwell reads format {FORMAT}; "
            "load it with the version that wrote it"
        )
    differences = _differences(state["settings"], settings)
    tensors = cast("Mapping[str, Tensor]", state["tensors"])
    for name, tensor in expected.items():
        if name not in tensors:
            differences.append(f"tensor {name} is missing")
        else:
            skip = 1 if name in GROWING else 0
            if tensors[name].shape[skip:] != tensor.shape[skip:]:
                differences.append(
                    f"tensor {name}: {tuple(tensors[name].shape)} in the state, {tuple(tensor.shape)} here"
                )
    if differences:
        shown = "\n  ".join(differences[:10] + (["..."] if len(differences) > 10 else []))
        raise ValueError(f"the state is of another run; nothing was loaded. It differs in:\n  {shown}")


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in sorted(set(saved) | set(here)):
        a, b = saved.get(key), here.get(key)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            inside = _differences(cast("dict[str, Any]", a), cast("dict[str, Any]", b))
            found += [f"{key} {line}" for line in inside]
        else:
            found.append(f"{key}: {a} in the state, {b} here")
    return found
