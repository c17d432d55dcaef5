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

from typing_extensions import override

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
    @override
    def stopping(self) -> bool:
        return bool(self._stop.value)

    @property
    @override
    def busy(self) -> int:
        return sum(job is not None for job in self._jobs.values())

    @property
    @override
    def idle(self) -> int:
        return len(self._jobs) - self.busy

    @override
    def stop(self) -> None:
        self._stop.value = 1

    @override
    def give(self, job: Job[Payload], checkpoint: Path) -> None:
        pipe = next(pipe for pipe, at_work in self._jobs.items() if at_work is None)
        self._jobs[pipe] = job
        with suppress(OSError):  # it died: its answer will say so
            pipe.send((job.setting, checkpoint))

    @override
    def answers(self, *, timeout: float) -> Iterator[Answer[Payload]]:
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

    @override
    def _open(self) -> None:
        for _ in range(self._count):
            self._start()

    @override
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
    reported = 0.0

    def report(steps: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
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
