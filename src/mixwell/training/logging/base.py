"""The interface of all loggers, and the registry of config sections that open them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, final

from mixwell.mixer.records import RoundRecord
from mixwell.training.logging.names import named, named_step
from mixwell.utils.registry import Registry
from mixwell.utils.regular_files import expand_user
from mixwell.utils.sections import ConfigSection

Outcome = Literal["finished", "stopped", "failed"]


class Logger(ABC):
    """Takes numbers by name at training steps. Close it at the end, or use it as a context manager.

    Args:
        after: where a run is resumed, the last step that counts as logged. Later steps that were logged before are
            removed if the tool can do that; steps up to it are not logged again.
    """

    def __init__(self, *, after: int | None = None) -> None:
        self._after = after
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(outcome_of(kind))

    def round(self, record: RoundRecord) -> None:
        """Log a round (``mixer.round_ended``) at the step at which it ended."""
        self.log(record.first_step + record.steps, named(record))

    def step(
        self,
        step: int,
        *,
        losses: Mapping[str, float] | None = None,
        rows: Mapping[str, int] | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log a training step; every number is optional.

        Args:
            step: training steps done, such as ``mixer.steps_done``.
            losses: mean loss by domain since the step that was logged before.
            rows: rows trained on so far, by domain.
            loss: the mean of the domains' losses by their weights.
        """
        self.log(step, named_step(losses=losses, rows=rows, loss=loss, learning_rate=learning_rate))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers, each under its name.

        Args:
            step: training steps done. It must not decrease.

        Raises:
            RuntimeError: the logger is closed.
        """
        if self._closed:
            raise RuntimeError("this logger is closed; log before close(), or make another one")
        if values and (self._after is None or step > self._after):
            self._write(step, values)

    def flush(self) -> None:
        """Make sure that everything logged survives this process, where the tool supports it."""

    def close(self, outcome: Outcome = "finished") -> None:
        """End logging; a second call does nothing.

        Args:
            outcome: whether training is done, was stopped and may be resumed, or failed.
        """
        if not self._closed:
            self._closed = True
            self._end(outcome)

    @property
    @abstractmethod
    def place(self) -> str:
        """A description for people of where the numbers are."""

    @property
    def identity(self) -> dict[str, str]:
        """The plain values with which a later process continues the same record of the tool."""
        return {}

    @abstractmethod
    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _end(self, outcome: Outcome) -> None: ...


@final
@dataclass(frozen=True)
class ResumePoint:
    """Where a run is resumed.

    Args:
        saved: the step of the checkpoint; -1 where there is none, so that the run starts again.
        logged: the last step that was logged before; -1 for none.
    """

    saved: int
    logged: int


@final
@dataclass(frozen=True)
class LoggerContext:
    """What a section needs in order to open its logger for a run.

    Args:
        folder: the run's directory.
        base: the folder to which relative paths refer.
        settings: of the run, for tools that show them.
        resume: where a stopped run is resumed; ``None`` for a new one.
        identity: :attr:`Logger.identity` of the logger that the run had before; empty for none.
    """

    folder: Path
    base: Path = Path()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    resume: ResumePoint | None = None
    identity: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The name of the run, which is that of its directory."""
        return self.folder.resolve().name

    @property
    def saved(self) -> int | None:
        """``after`` of a tool that can remove numbers."""
        return None if self.resume is None else self.resume.saved

    @property
    def logged(self) -> int | None:
        """``after`` of a tool that cannot remove numbers and continues its record."""
        return None if self.resume is None else max(self.resume.saved, self.resume.logged)

    def path(self, given: str) -> Path:
        """Return the absolute path of one in the config."""
        return self.base / expand_user(given)


class LoggerConfig(ConfigSection):
    """The settings of a logger under ``loggers`` in a config."""

    remote: ClassVar[bool] = False
    """Whether opening it may fail because of a server; these are opened first, before others write anything."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the files and folders that it makes in the run's directory."""
        return ()

    def check_installed(self) -> None:
        """Raise ValueError, with the package to install, where the tool is missing."""

    @abstractmethod
    def open(self, run: LoggerContext) -> Logger:
        """Open the logger of a run, or continue the one that it had."""


LOGGERS = Registry[type[LoggerConfig]]("logger", package="mixwell.integrations.loggers")
"""Config sections by the key under ``loggers``."""


def outcome_of(kind: type[BaseException] | None) -> Outcome:
    """Return how training ended, by the exception that left its block; an interruption is no failure."""
    if kind is None:
        return "finished"
    return "stopped" if issubclass(kind, InterruptedError | KeyboardInterrupt) else "failed"


def import_tool(module: str, *, name: str, extra: str) -> Any:
    """Import the package of a tool.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging to {name} needs its package ({error}): pip install 'mixwell[{extra}]'"
        ) from error
