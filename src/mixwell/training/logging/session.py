"""The loggers of a run: opened before training, continued after a stop; their failures do not stop it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, final

from mixwell.training.logging.base import Logger, LoggerConfig, LoggerContext, outcome_of
from mixwell.training.randomness import generators_kept
from mixwell.utils import checksums, files

FILE = "loggers.json"
"""By tool, the identity of its record, such as the id of a W&B run."""

Chosen = Mapping[str, LoggerConfig]


@final
class RunLoggers:
    """Passes the numbers of a run to all of its loggers.

    Each call restores the random generators. A logger that fails while the model trains is dropped with a warning;
    the run continues.

    Args:
        own: loggers by name, which are closed at the end.
        given: loggers that the caller closes.
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
        with generators_kept():
            for name, logger in self._own.items():
                try:
                    logger.close(outcome_of(kind))
                except Exception as wrong:
                    warnings.warn(f"the logger {name} could not be closed ({wrong})", stacklevel=2)

    @property
    def places(self) -> list[str]:
        """:attr:`Logger.place` of each."""
        return [logger.place for logger in self._own.values()]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call :meth:`Logger.log` of each."""
        self._call_all(lambda logger: logger.log(step, values))

    def flush(self) -> None:
        """Call :meth:`Logger.flush` of each."""
        self._call_all(lambda logger: logger.flush())

    def _call_all(self, call: Callable[[Logger], None]) -> None:
        if not self._all:
            return
        with generators_kept():
            for name, logger in list(self._all.items()):
                try:
                    call(logger)
                except Exception as error:
                    self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        warnings.warn(
            f"the logger {name} failed ({error}) and is dropped; the run continues, and its metrics.jsonl has "
            "everything",
            stacklevel=4,
        )
        del self._all[name]
        if name in self._own:
            with suppress(Exception):
                self._own.pop(name).close("failed")


def check_installed(chosen: Chosen) -> None:
    """Raise ValueError where a tool is missing, before a run has done anything."""
    with generators_kept():
        for section in chosen.values():
            section.check_installed()


def outputs(chosen: Chosen) -> tuple[str, ...]:
    """Return the names of the files and folders that loggers make in the run's directory."""
    return (FILE, *(name for section in chosen.values() for name in section.outputs))


def open_all(chosen: Chosen, run: LoggerContext, *, given: Sequence[Logger] = ()) -> RunLoggers:
    """Open the loggers of a run, or continue those that it had.

    Args:
        given: more loggers, which are open already.

    Raises:
        ValueError: one of them cannot be opened; those that were are closed.
    """
    noted: dict[str, dict[str, str]] = {}
    if run.resume is not None and (run.folder / FILE).exists():
        noted = checksums.read_sealed(run.folder / FILE)
    opened: dict[str, Logger] = {}
    with generators_kept():
        for name in sorted(chosen, key=lambda name: not chosen[name].remote):
            try:
                opened[name] = chosen[name].open(replace(run, identity=noted.get(name, {})))
            except BaseException as error:
                for logger in opened.values():
                    with suppress(Exception):
                        logger.close(outcome_of(type(error)))
                if isinstance(error, ValueError | OSError):
                    raise ValueError(f"loggers.{name}: {error}") from error
                raise
    identities = {name: logger.identity for name, logger in opened.items() if logger.identity}
    if identities:
        files.write_atomically(run.folder / FILE, checksums.sealed(noted | identities, indent=1))
    return RunLoggers(opened, given)


def remove_outputs(chosen: Chosen, folder: Path) -> None:
    """Remove what loggers have made in the directory of a run that never began."""
    for name in outputs(chosen):
        path = folder / name
        if path.is_dir():
            files.remove_tree(path)
        else:
            path.unlink(missing_ok=True)
