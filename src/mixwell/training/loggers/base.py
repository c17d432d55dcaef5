"""What all loggers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from mixwell.mixer.records import RoundRecord
from mixwell.training.loggers.names import named, named_step

Outcome = Literal["finished", "stopped", "failed"]


class Logger(ABC):
    """Takes numbers by name at training steps. Close it at the end, or use it as a context manager.

    Args:
        after: the last step that counts as logged, where a run goes on. What was logged of later steps is
            forgotten if the tool can do that (:attr:`forgets`); what is logged again up to it is left out.
    """

    forgets: ClassVar[bool]
    """Whether what was logged can be taken back when a run goes on from an earlier step."""

    def __init__(self, *, after: int | None = None) -> None:
        self._after = after
        self._closed = False

    @staticmethod
    def load() -> Any:
        """Import the tool, where there is one; a missing one is an error that says what to install."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(outcome_of(kind))

    def round(self, record: RoundRecord) -> None:
        """Log a round at the step at which it ended.

        Args:
            record: ``mixer.round_ended``.
        """
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
        """Log a training step; give what there is.

        Args:
            step: training steps done, such as ``mixer.steps_done``.
            losses: mean loss by domain since the step that was logged before.
            rows: rows trained on so far, by domain.
            loss: the mean of the domains' losses by their weights.
            learning_rate: of the step.
        """
        self.log(step, named_step(losses=losses, rows=rows, loss=loss, learning_rate=learning_rate))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers, each under its name.

        Args:
            step: training steps done. It must not become less.
            values: by name.

        Raises:
            RuntimeError: the logger is closed.
        """
        if self._closed:
            raise RuntimeError("this logger is closed; log before close(), or make another one")
        if values and (self._after is None or step > self._after):
            self._write(step, values)

    def flush(self) -> None:
        """Make sure that what was logged survives this process, where the tool lets one ask for it."""

    def close(self, outcome: Outcome = "finished") -> None:
        """End logging; a second call does nothing.

        Args:
            outcome: how training ended: it is done, was stopped and may go on, or failed.
        """
        if not self._closed:
            self._closed = True
            self._end(outcome)

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the numbers are, in words for people."""

    @property
    def identity(self) -> dict[str, str]:
        """What a later process needs in order to go on with the same record of the tool, as plain values."""
        return {}

    @abstractmethod
    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _end(self, outcome: Outcome) -> None: ...


def outcome_of(kind: type[BaseException] | None) -> Outcome:
    """How training ended, from what left its block.

    Args:
        kind: of the exception, ``None`` where there was none.

    Returns:
        The outcome; what stops a run that may go on is no failure.
    """
    if kind is None:
        return "finished"
    return "stopped" if issubclass(kind, InterruptedError | KeyboardInterrupt) else "failed"


def tool(module: str, *, name: str, extra: str) -> Any:
    """Import a tool.

    Args:
        module: to import.
        name: of the tool, for people.
        extra: of mixwell, that installs it.

    Returns:
        The module.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging to {name} needs its package ({error}): pip install 'mixwell[{extra}]'"
        ) from error
