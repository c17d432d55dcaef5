"""Worker processes with one thread each, which can be asked to save and stop, and may die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, cast, final

SettingT = TypeVar("SettingT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
Payload = TypeVar("Payload")
REPORT_SECONDS = 0.5
_CONTEXT = multiprocessing.get_context("spawn")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
            setting: of the run.
            checkpoint: to continue from if it is there, and to save to.
            report: to be told how many steps are done.
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


@final
class Workers(Generic[Payload]):
    """Some processes that do jobs. On leaving, those at work are asked to save, and are waited for.

    Ctrl-C and SIGTERM ask all to save and stop. Nothing is shared that a process could hold when it is killed.

    Args:
        work: does one job.
        count: of the processes.
    """

    def __init__(self, work: Work[Payload, Any], count: int) -> None:
        self._work, self._count = work, count
        self._stop = _CONTEXT.RawValue("b", 0)
        self._jobs: dict[Connection, Job[Payload] | None] = {}
        self._processes: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Workers[Payload]:
        self._before = [signal.signal(kind, self._on_signal) for kind in _SIGNALS]
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
            while self.busy:
                list(self.answers(timeout=0.2))
            for pipe, process in self._processes.items():
                pipe.close()  # the worker ends
                process.join()
        finally:
            for kind, old in zip(_SIGNALS, self._before, strict=True):
                signal.signal(kind, old)

    @property
    def stopping(self) -> bool:
        """Whether the workers were asked to stop."""
        return bool(self._stop.value)

    @property
    def busy(self) -> int:
        """How many are at work."""
        return sum(job is not None for job in self._jobs.values())

    @property
    def idle(self) -> int:
        """How many wait for a job."""
        return len(self._jobs) - self.busy

    def stop(self) -> None:
        """Ask all to save and stop."""
        self._stop.value = 1

    def give(self, job: Job[Payload], checkpoint: Path) -> None:
        """Give a job to an idle worker.

        Args:
            job: to be done.
            checkpoint: its file.
        """
        pipe = next(pipe for pipe, at_work in self._jobs.items() if at_work is None)
        self._jobs[pipe] = job
        with suppress(OSError):  # it died: its answer will say so
            pipe.send((job.setting, checkpoint))

    def answers(self, *, timeout: float) -> Iterator[Answer[Payload]]:
        """What the workers say, as far as they have said something. One that died is replaced.

        Args:
            timeout: in seconds, to wait for the first.

        Yields:
            Answers.
        """
        at_work = [pipe for pipe, job in self._jobs.items() if job is not None]
        for pipe in cast("list[Connection]", wait(at_work, timeout)):
            job = self._jobs[pipe]
            assert job is not None
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):
                kind, content = "died", "its process died"
                del self._jobs[pipe]
                self._processes.pop(pipe).join()
                pipe.close()
                if not self.stopping:
                    self._start()
            if kind not in ("steps", "died"):
                self._jobs[pipe] = None
            yield Answer(kind, job, content)

    def _start(self) -> None:
        here, there = _CONTEXT.Pipe()
        with _signals_blocked(), _one_thread():
            process = _CONTEXT.Process(
                target=_serve, args=(self._work, there, self._stop, os.getpid()), daemon=True
            )
            process.start()
        there.close()  # so that the pipe ends with the worker
        self._jobs[here], self._processes[here] = None, process

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop()


def _serve(work: Work[Any, Any], pipe: Connection, stop: Any, parent: int) -> None:
    """A worker: do jobs until the pipe ends. Signals, which a terminal sends to all, are for the parent."""
    for kind in _SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    import torch

    torch.set_num_threads(1)
    told = 0.0

    def report(steps: int) -> None:
        nonlocal told
        if time.monotonic() - told > REPORT_SECONDS:
            told = time.monotonic()
            with suppress(OSError):
                pipe.send(("steps", steps))

    def stopping() -> bool:
        return bool(stop.value) or os.getppid() != parent

    with suppress(EOFError, OSError):
        while True:
            setting, checkpoint = pipe.recv()
            try:
                if stopping():
                    raise StoppedError
                pipe.send(("done", work(setting, checkpoint=checkpoint, report=report, stopping=stopping)))
            except StoppedError:
                pipe.send(("stopped", None))
            except Exception as error:
                pipe.send(("failed", (f"{type(error).__name__}: {error}", traceback.format_exc())))


@contextmanager
def _signals_blocked() -> Generator[None]:
    """A process that is started inside gets no signal before it can ignore them; the parent gets them later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would unblock them when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _one_thread() -> Generator[None]:
    """A process that is started inside gets one thread: more would only wait for each other."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
