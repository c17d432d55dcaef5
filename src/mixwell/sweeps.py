"""Many independent runs in worker processes: one thread each, with progress, stopped and continued at will."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, cast, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SettingT = TypeVar("SettingT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
Payload = TypeVar("Payload")
Result = TypeVar("Result")
REPORT_SECONDS, LINE_SECONDS = 0.5, 15.0


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


class StoppedError(Exception):
    """Raised by work that was asked to stop, after it saved its checkpoint."""


@final
@dataclass(frozen=True)
class Job(Generic[Payload]):
    """One run of a sweep.

    Args:
        name: names it in messages and names its checkpoint.
        steps: how much work it is.
        setting: what the work is given.
    """

    name: str
    steps: int
    setting: Payload


def check_workers(workers: int) -> None:
    """Refuse a number of workers that cannot be.

    Args:
        workers: processes.

    Raises:
        ValueError: it is below one.
    """
    if workers < 1:
        raise ValueError(f"a sweep needs at least 1 worker, got {workers}")


def run_sweep(
    work: Work[Payload, Result],
    jobs: Sequence[Job[Payload]],
    *,
    workers: int,
    checkpoints: Path,
    on_done: Callable[[Job[Payload], Result], None],
    console: Console | None = None,
) -> None:
    """Run all jobs, some at a time.

    Every job has a checkpoint in a folder, so an interrupted sweep continues where it stopped when the same
    jobs are given again (without those whose results are there). Checkpoints of finished jobs are removed.

    Args:
        work: does one job, in a process with one thread.
        jobs: begun in this order.
        workers: processes.
        checkpoints: the folder for the checkpoints.
        on_done: told each result in this process, as it comes.
        console: for the progress bar; a line now and then where it is not a terminal.

    Raises:
        InterruptedError: by Ctrl-C or SIGTERM, after the workers saved.
        ChildProcessError: a job failed; the rest was stopped and saved.
    """
    check_workers(workers)
    if not jobs:
        return
    checkpoints.mkdir(parents=True, exist_ok=True)
    stop = _CONTEXT.RawValue("b", 0)  # without a lock, which a worker that is killed might hold for ever

    def file_of(job: Job[Payload]) -> Path:
        return checkpoints / f"{job.name}.safetensors"

    waiting, failure = list(reversed(jobs)), ""
    with _Display(jobs, console or Console()) as display, _stopped_by_signals(stop), _one_thread():
        busy: dict[Connection, Job[Payload] | None] = dict.fromkeys(
            [_start(work, stop) for _ in range(min(workers, len(jobs)))]
        )
        while busy:
            for pipe, job in list(busy.items()):
                if job is None:
                    if stop.value or not waiting:
                        del busy[pipe]
                        pipe.close()  # the worker ends
                    else:
                        busy[pipe] = following = waiting.pop()
                        pipe.send((following, file_of(following)))
            for pipe in cast("list[Connection]", wait(list(busy), timeout=0.2)):
                job = busy[pipe]
                assert job is not None
                kind, content = _answer(pipe)
                if kind == "steps":
                    display.advance(job.name, content)
                    continue
                busy[pipe] = None
                if kind == "died":
                    del busy[pipe]
                if kind == "done":
                    on_done(job, content)
                    file_of(job).unlink(missing_ok=True)
                    display.finish(job.name)
                elif kind != "stopped":
                    failure = failure or f"the run {job.name} failed ({content}); the others were saved"
                    stop.value = 1
    if failure:
        raise ChildProcessError(failure)
    if stop.value:
        raise InterruptedError("stopped; the same command continues where this one left off")
    if not any(checkpoints.iterdir()):
        checkpoints.rmdir()


_CONTEXT = multiprocessing.get_context("spawn")


def _start(work: Work[Any, Any], stop: Any) -> Connection:
    """A new worker, and the pipe to it."""
    here, there = _CONTEXT.Pipe()
    _CONTEXT.Process(target=_serve, args=(work, there, stop), daemon=True).start()
    there.close()  # so that the pipe ends with the worker
    return here


def _answer(pipe: Connection) -> tuple[str, Any]:
    """What a worker says: ``steps`` done, ``done``, ``stopped`` or ``failed``; or that it ``died``."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return "died", "its process died"


def _serve(work: Work[Any, Any], pipe: Connection, stop: Any) -> None:
    """A worker: do jobs until the pipe ends. Ctrl-C, which a terminal sends to all, is for the parent."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent, told = os.getppid(), 0.0

    def report(steps: int) -> None:
        nonlocal told
        if time.monotonic() - told > REPORT_SECONDS:
            told = time.monotonic()
            with suppress(ConnectionError):
                pipe.send(("steps", steps))

    def stopping() -> bool:
        return bool(stop.value) or os.getppid() != parent

    with suppress(EOFError, ConnectionError):
        while True:
            job, checkpoint = pipe.recv()
            try:
                answer = "done", work(job.setting, checkpoint=checkpoint, report=report, stopping=stopping)
            except StoppedError:
                answer = "stopped", None
            except Exception as error:
                answer = "failed", f"{type(error).__name__}: {error}"
            pipe.send(answer)


@contextmanager
def _stopped_by_signals(stop: Any) -> Generator[None]:
    """Ctrl-C and SIGTERM ask the workers to save and stop."""

    def handler(number: int, frame: FrameType | None) -> None:
        stop.value = 1

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, handler) for kind in kinds]
    try:
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            signal.signal(kind, old)


@contextmanager
def _one_thread() -> Generator[None]:
    """Processes that are started inside get one thread each: more would only wait for each other."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@dataclass
class _Display:
    """A bar over all steps of all jobs; lines, not too many, where there is no terminal."""

    jobs: Sequence[Job[Any]]
    console: Console
    done: dict[str, int] = field(default_factory=dict[str, int])
    finished: int = 0

    def __enter__(self) -> _Display:
        self._total = sum(job.steps for job in self.jobs)
        self._steps = {job.name: job.steps for job in self.jobs}
        self._first: dict[str, int] = {}
        self._begun = self._told = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task(self._description(), total=self._total)
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, name: str, steps: int) -> None:
        """Note how many steps of a run are done."""
        self._first.setdefault(name, steps)
        self.done[name] = max(steps, self.done.get(name, 0))
        self._bar.update(self._task, completed=sum(self.done.values()), description=self._description())

    def finish(self, name: str) -> None:
        """Note that a run is finished."""
        self.finished += 1
        self.advance(name, self._steps[name])
        now = time.monotonic()
        due = now - self._told > LINE_SECONDS or self.finished == len(self.jobs)
        if not self.console.is_terminal and due:
            self._told = now
            elapsed = now - self._begun
            made = sum(self.done.values()) - sum(self._first.values())
            left = (self._total - sum(self.done.values())) * elapsed / made if made else 0.0
            self.console.print(
                f"{self.finished}/{len(self.jobs)} runs, {name} done, {elapsed / 60:.1f} minutes, "
                f"about {left / 60:.1f} left",
                highlight=False,
                soft_wrap=True,
            )

    def _description(self) -> str:
        return f"{self.finished}/{len(self.jobs)} runs"
