"""The loggers of a run in its directory: begun before training, continued after a stop, never in its way."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch

from mixwell.integrations.loggers.mlflow import MlflowLogger
from mixwell.integrations.loggers.tensorboard import TensorBoardLogger
from mixwell.integrations.loggers.wandb import WandbLogger
from mixwell.training.loggers.base import Logger, outcome_of
from mixwell.training.loggers.jsonl import JsonlLogger
from mixwell.utils import files

FILE = "loggers.json"
"""By tool, what a run that goes on needs to know, such as the id of a W&B run."""
KINDS: dict[str, type[Logger]] = {
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
    "jsonl": JsonlLogger,
    "tensorboard": TensorBoardLogger,
}
"""In the order in which they begin: those that may fail come first, and leave the fewest traces if they do."""
_PLACES = {"wandb": "wandb", "jsonl": "logged.jsonl", "tensorboard": "tensorboard"}
"""What they make in the run's directory, unless they are told another place."""
_SQLITE = "sqlite:///"

Options = Mapping[str, Any]


@final
@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Args:
        saved: the step of the checkpoint; -1 where there is none, so that the run begins again.
        told: the last step that loggers were told before; -1 for none.
    """

    saved: int
    told: int


@final
class RunLoggers:
    """Tells all loggers of a run what happens, and never changes its numbers.

    The random generators are as before after each call. A logger that fails while the model trains is told nothing
    more, with a warning; the run goes on.

    Args:
        own: loggers by name, which are closed at the end.
        given: loggers that somebody else closes.
    """

    def __init__(self, own: Mapping[str, Logger], given: Sequence[Logger] = ()) -> None:
        self._own = dict(own)
        self._all = {
            **self._own,
            **{f"{type(one).__name__} {n}": one for n, one in enumerate(given, start=1)},
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        with _generators_kept():
            for name, logger in self._own.items():
                try:
                    logger.close(outcome_of(kind))
                except Exception as wrong:
                    warnings.warn(f"the logger {name} could not be closed ({wrong})", stacklevel=2)

    @property
    def places(self) -> list[str]:
        """Where the numbers are, in words for people."""
        return [logger.place for logger in self._own.values()]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Tell all of them.

        Args:
            step: training steps done.
            values: by name.
        """
        self._ask_all(lambda logger: logger.log(step, values))

    def flush(self) -> None:
        """All that was logged survives this process, where a tool lets one ask for it."""
        self._ask_all(lambda logger: logger.flush())

    def _ask_all(self, call: Callable[[Logger], None]) -> None:
        if not self._all:
            return
        with _generators_kept():
            for name, logger in list(self._all.items()):
                try:
                    call(logger)
                except Exception as error:
                    self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        warnings.warn(
            f"the logger {name} failed ({error}) and is told nothing more; the run goes on, and its metrics.jsonl "
            "has everything",
            stacklevel=4,
        )
        del self._all[name]
        if name in self._own:
            with suppress(Exception):
                self._own.pop(name).close("failed")


def expect_installed(chosen: Mapping[str, Options]) -> None:
    """See that the tools are there, before a run has done anything.

    Args:
        chosen: options by tool.
    """
    with _generators_kept():
        for name in chosen:
            KINDS[name].load()


def makes(chosen: Mapping[str, Options]) -> tuple[str, ...]:
    """What loggers make in the run's directory.

    Args:
        chosen: options by tool.

    Returns:
        Names of files and folders.
    """
    own = (name for name, options in chosen.items() if not (options.get("folder") or options.get("path")))
    return (FILE, *(_PLACES[name] for name in own if name in _PLACES))


def begin(
    chosen: Mapping[str, Options],
    folder: Path,
    *,
    base: Path,
    settings: Mapping[str, Any],
    going_on: ResumePoint | None = None,
    given: Sequence[Logger] = (),
) -> RunLoggers:
    """Begin the loggers of a run, or go on with those that it had.

    Args:
        chosen: options by tool.
        folder: the run's directory.
        base: the folder to which relative paths refer.
        settings: of the run, for tools that show them.
        going_on: where a stopped run goes on; ``None`` for a new one.
        given: more loggers, which are open already.

    Returns:
        All of them.

    Raises:
        ValueError: one of them cannot begin; those that have begun are closed.
    """
    noted: dict[str, dict[str, str]] = {}
    if going_on is not None and (folder / FILE).exists():
        noted = json.loads((folder / FILE).read_text(encoding="utf-8"))
    begun: dict[str, Logger] = {}
    with _generators_kept():
        for name, kind in KINDS.items():
            if name not in chosen:
                continue
            try:
                options = _options(name, chosen[name], folder, base, noted.get(name, {}), settings)
                begun[name] = kind(**options, after=_after(kind, going_on, known="id" in options))
            except BaseException as error:
                for logger in begun.values():
                    with suppress(Exception):
                        logger.close(outcome_of(type(error)))
                if isinstance(error, ValueError | OSError):
                    raise ValueError(f"loggers.{name}: {error}") from error
                raise
    identities = {name: logger.identity for name, logger in begun.items() if logger.identity}
    if identities:
        files.write_atomically(folder / FILE, json.dumps(noted | identities, indent=1) + "\n")
    return RunLoggers(begun, given)


def forget(chosen: Mapping[str, Options], folder: Path) -> None:
    """Remove what loggers have made in the directory of a run that never began.

    Args:
        chosen: options by tool.
        folder: the run's directory.
    """
    for name in makes(chosen):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _after(kind: type[Logger], going_on: ResumePoint | None, *, known: bool) -> int | None:
    """The step up to which a logger has what it needs."""
    if going_on is None:
        return None
    if kind.forgets:
        return going_on.saved
    return max(going_on.saved, going_on.told) if known else None


def _options(
    name: str,
    options: Options,
    folder: Path,
    base: Path,
    noted: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a logger."""
    found = {key: value for key, value in options.items() if value}
    for key in ("folder", "path"):
        if key in found:
            found[key] = base / Path(found[key]).expanduser()
    match name:
        case "tensorboard":
            return {"folder": folder / _PLACES[name], **found}
        case "jsonl":
            return {"path": folder / _PLACES[name], **found}
        case "wandb":
            begun_before = dict(noted) if noted else {"settings": settings}
            return {"name": folder.resolve().name, "folder": folder, **found, **begun_before}
        case _:
            uri = found.get("uri", noted.get("uri"))
            if uri is not None and uri.startswith(_SQLITE):
                found["uri"] = uri = _SQLITE + str(base / uri.removeprefix(_SQLITE))
            if noted and noted.get("uri") == uri:
                return {"uri": uri, "id": noted["id"]}
            return {"name": folder.resolve().name, "settings": settings, **found}


@contextmanager
def _generators_kept() -> Generator[None]:
    """Tools may draw random numbers, for names or for waiting; a run with them must be the same as one without."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)
