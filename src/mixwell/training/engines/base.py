"""What every engine of sweeps has in common: jobs, answers, and workers that can be asked to save and stop."""

from __future__ import annotations

import os
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, final

SettingT = TypeVar("SettingT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
Payload = TypeVar("Payload")
REPORT_SECONDS = 0.5
DIED = "its process died"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Raised by work that was asked to stop, after it saved its checkpoint."""


class Work(Protocol[SettingT, ResultT]):
    """What a worker does: a function at the top of a module, so that other processes can find it."""

    def __call__(
        self,
        setting: SettingT,
        /,
        *,
        checkpoint: Path,
        report: Callable[[int], None],
        stopping: Callable[[], bool],
    ) -> ResultT:
        """Do one run.

        Args:
            checkpoint: to continue from if it is there, and to save to.
            report: to be called with the steps done.
            stopping: asks whether to save and raise :class:`StoppedError`.
        """
        ...


@final
@dataclass(frozen=True)
class Job(Generic[Payload]):
    """One run.

    Args:
        name: names it in messages and names its checkpoint.
        steps: how much work it is.
        setting: what the work is given.
    """

    name: str
    steps: int
    setting: Payload


@final
@dataclass(frozen=True)
class Answer(Generic[Payload]):
    """What a worker says of its job.

    Args:
        kind: ``"steps"`` (how many are done), ``"done"`` (with the result), ``"stopped"``, ``"failed"`` (with a
            message and where it happened) or ``"died"``.
        job: of which it speaks.
        content: what goes with it.
    """

    kind: str
    job: Job[Payload]
    content: Any


class Workers(ABC, Generic[Payload]):
    """Some workers that do jobs. On leaving, those at work are asked to save, and are waited for.

    Ctrl-C and SIGTERM ask all to save and stop.
    """

    def __enter__(self) -> Workers[Payload]:
        self._before = [signal.getsignal(kind) for kind in SIGNALS]
        with signals_blocked():
            try:
                self._open()
            except BaseException:
                self._restore_handlers()
                raise
            for kind in SIGNALS:  # after opening, which may bring handlers of its own
                signal.signal(kind, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
            while self.busy:
                list(self.answers(timeout=0.2))
        finally:
            try:
                self._close()
            finally:
                self._restore_handlers()

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether the workers were asked to stop."""

    @property
    @abstractmethod
    def busy(self) -> int:
        """How many are at work."""

    @property
    @abstractmethod
    def idle(self) -> int:
        """How many wait for a job."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all to save and stop. A handler of signals may call it."""

    @abstractmethod
    def give(self, job: Job[Payload], checkpoint: Path) -> None:
        """Give a job to an idle worker."""

    @abstractmethod
    def answers(self, *, timeout: float) -> Iterator[Answer[Payload]]:
        """What the workers say, as far as they have said something. One that died is replaced.

        Args:
            timeout: in seconds, to wait for the first.

        Yields:
            Answers.
        """

    @abstractmethod
    def _open(self) -> None:
        """Start the workers. No signal comes meanwhile."""

    @abstractmethod
    def _close(self) -> None:
        """End the workers, none of which is at work."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _restore_handlers(self) -> None:
        for kind, old in zip(SIGNALS, self._before, strict=True):
            signal.signal(kind, old)


def attempt(
    work: Work[Any, Any],
    setting: Any,
    *,
    checkpoint: Path,
    report: Callable[[int], None],
    stopping: Callable[[], bool],
) -> tuple[str, Any]:
    """Do one job, in a worker.

    Args:
        report: called with the steps done.

    Returns:
        Kind and content of an :class:`Answer`.
    """
    try:
        if stopping():
            raise StoppedError
        return "done", work(setting, checkpoint=checkpoint, report=report, stopping=stopping)
    except StoppedError:
        return "stopped", None
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> tuple[str, Any]:
    """What a worker says of a job that raised.

    Returns:
        Kind and content of an :class:`Answer`.
    """
    return "failed", (f"{type(error).__name__}: {error}", traceback.format_exc())


@contextmanager
def signals_blocked() -> Generator[None]:
    """A process that is started inside gets no signal before it can ignore them; the parent gets them later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would unblock them when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment_with(values: Mapping[str, str]) -> Generator[None]:
    """Processes that are started inside have these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old
