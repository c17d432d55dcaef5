"""Workers that are processes on this machine, with one thread each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast, final

from mixwell.training.engines.base import (
    DIED,
    REPORT_SECONDS,
    SIGNALS,
    Answer,
    Job,
    Payload,
    Work,
    Workers,
    attempt,
    environment_with,
    failed,
    signals_blocked,
)

_CONTEXT = multiprocessing.get_context("spawn")


def cores() -> int:
    """How many processes can run at once on the cores that this one may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class LocalWorkers(Workers[Payload]):
    """Some processes that do jobs. Nothing is shared that a process could hold when it is killed.

    Args:
        work: does one job.
        count: of the processes.
    """

    def __init__(self, work: Work[Payload, Any], count: int) -> None:
        self._work, self._count = work, count
        self._stop = _CONTEXT.RawValue("b", 0)
        self._jobs: dict[Connection, Job[Payload] | None] = {}
        self._processes: dict[Connection, BaseProcess] = {}

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
                kind, content = "died", DIED
                del self._jobs[pipe]
                self._processes.pop(pipe).join()
                pipe.close()
                if not self.stopping:
                    self._start()
            if kind not in ("steps", "died"):
                self._jobs[pipe] = None
            yield Answer(kind, job, content)

    def _open(self) -> None:
        for _ in range(self._count):
            self._start()

    def _close(self) -> None:
        for pipe, process in self._processes.items():
            pipe.close()  # the worker ends
            process.join()

    def _start(self) -> None:
        here, there = _CONTEXT.Pipe()
        with signals_blocked(), environment_with({"OMP_NUM_THREADS": "1"}):
            process = _CONTEXT.Process(
                target=_serve, args=(self._work, there, self._stop, os.getpid()), daemon=True
            )
            process.start()
        there.close()  # so that the pipe ends with the worker
        self._jobs[here], self._processes[here] = None, process


def _serve(work: Work[Any, Any], pipe: Connection, stop: Any, parent: int) -> None:
    """A worker: do jobs until the pipe ends. Signals, which a terminal sends to all, are for the parent."""
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
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
            answer = attempt(work, setting, checkpoint=checkpoint, report=report, stopping=stopping)
            try:
                pipe.send(answer)
            except OSError:
                raise
            except Exception as error:  # a result that cannot be sent
                pipe.send(failed(error))
