"""The interface of engines: jobs, messages, and workers that can be asked to stop."""

from __future__ import annotations

import os
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, final

SettingT = TypeVar("SettingT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
Payload = TypeVar("Payload")
REPORT_SECONDS = 0.5
DIED = "its process died"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Raised by work that was asked to stop, after it saved its state (if it has any)."""


class Work(Protocol[SettingT, ResultT]):
    """The function that does one job; defined at the top level of a module so that it can be pickled."""

    def __call__(
        self,
        setting: SettingT,
        /,
        *,
        report: Callable[[int], None],
        stopping: Callable[[], bool],
    ) -> ResultT:
        """Do one job.

        Args:
            setting: the job's :attr:`Job.setting`.
            report: to be called with the number of steps done.
            stopping: returns whether to save and raise :class:`StoppedError`.
        """
        ...


@final
@dataclass(frozen=True)
class Job(Generic[Payload]):
    """One unit of work.

    Args:
        name: used in messages and file names.
        steps: amount of work, for the progress bar.
        setting: passed to the work.
    """

    name: str
    steps: int
    setting: Payload


@final
@dataclass(frozen=True)
class Message(Generic[Payload]):
    """A message from a worker about its job.

    Args:
        kind: ``"steps"`` (content: number of steps done), ``"done"`` (the result), ``"stopped"``, ``"failed"``
            (error message and traceback) or ``"died"``.
    """

    kind: str
    job: Job[Payload]
    content: Any


class Workers(ABC, Generic[Payload]):
    """A pool of workers. On exit the busy ones are asked to stop, and are waited for.

    Ctrl-C and SIGTERM ask all to stop.
    """

    def __enter__(self) -> Workers[Payload]:
        self._before = [signal.getsignal(kind) for kind in SIGNALS]
        with signals_blocked():
            # A progress bar has a thread, which gets signals that are blocked in this one.
            self._install_handlers()
            try:
                self._open()
            except BaseException:
                self._restore_handlers()
                raise
            self._install_handlers()  # once more: opening may have installed others
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
            while self.busy:
                list(self.messages(timeout=0.2))
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
        """Number of workers with a job."""

    @property
    @abstractmethod
    def idle(self) -> int:
        """Number of workers that can take a job."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to stop. Safe to call from a signal handler."""

    @abstractmethod
    def submit(self, job: Job[Payload]) -> None:
        """Give a job to an idle worker."""

    @abstractmethod
    def messages(self, *, timeout: float) -> Iterator[Message[Payload]]:
        """Yield the messages that have arrived, waiting ``timeout`` seconds for the first.

        A worker that died is replaced.
        """

    @abstractmethod
    def _open(self) -> None:
        """Start the workers. Signals are blocked meanwhile."""

    @abstractmethod
    def _close(self) -> None:
        """Shut down the workers, all of which are idle."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def _install_handlers(self) -> None:
        for kind in SIGNALS:
            signal.signal(kind, self._on_signal)

    def _restore_handlers(self) -> None:
        for kind, old in zip(SIGNALS, self._before, strict=True):
            signal.signal(kind, old)


def attempt(
    work: Work[Any, Any],
    setting: Any,
    *,
    report: Callable[[int], None],
    stopping: Callable[[], bool],
) -> tuple[str, Any]:
    """Do one job, in a worker, and return kind and content of a :class:`Message`."""
    try:
        if stopping():
            raise StoppedError
        return "done", work(setting, report=report, stopping=stopping)
    except StoppedError:
        return "stopped", None
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> tuple[str, Any]:
    """Return kind and content of the :class:`Message` about a job that raised the exception being handled."""
    return "failed", (f"{type(error).__name__}: {error}", traceback.format_exc())


@contextmanager
def signals_blocked() -> Generator[None]:
    """Block signals, so that a process started inside gets none before it can ignore them; ours come later."""
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
    """Set environment variables of the processes that are started inside."""
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
