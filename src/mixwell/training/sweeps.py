"""Independent runs by the workers of an engine, with progress; interrupted and continued at will."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mixwell.training.engines import LOCAL, Engine, Job, Work
from mixwell.training.interrupts import STOPPED, interruptible
from mixwell.utils import files
from mixwell.utils.terminal import say

Payload = TypeVar("Payload")
Result = TypeVar("Result")
LINE_SECONDS = 15.0


def check_workers(workers: int | None, engine: Engine = LOCAL) -> None:
    """Raise if the workers cannot be started, before anything is written.

    Raises:
        ValueError: The number is below one, or the engine is not installed.
        OSError: The engine does not answer.
    """
    _check_number(workers)
    engine.check()


def run_sweep(
    work: Work[Payload, Result],
    jobs: Sequence[Job[Payload]],
    *,
    workers: int | None,
    folder: Path,
    on_done: Callable[[Job[Payload], Result], None],
    console: Console | None = None,
    engine: Engine = LOCAL,
) -> None:
    """Run all jobs, some at a time.

    An interrupted sweep continues when it is called again with the jobs that have no result yet. A job that
    fails does not prevent the others.

    Args:
        work: does one job, in a process with one thread.
        jobs: started in this order.
        workers: number of concurrent jobs; ``None`` for one per core (of the cluster, if the engine has one).
        folder: holds the tracebacks of failed jobs; removed when it is empty. All workers must see it.
        on_done: called in this process with each result.
        console: shows a progress bar; a line now and then if it is not a terminal.
        engine: where the jobs run. A sweep may continue on another engine.

    Raises:
        ValueError: There are no workers, or the engine is not installed.
        InterruptedError: Ctrl-C or SIGTERM; the workers have stopped.
        ChildProcessError: Jobs failed; the others are done.
        OSError: The engine does not answer, or its workers cannot start.
    """
    _check_number(workers)
    if not jobs:
        _remove_if_empty(folder)  # left by a sweep that was stopped just after its last job
        return
    folder.mkdir(parents=True, exist_ok=True)
    waiting, failures = list(reversed(jobs)), list[str]()
    console = console or Console()
    made = engine.workers(
        work, count=workers, jobs=len(jobs), folder=folder, say=lambda text: say(console, text)
    )
    with interruptible(), _Display(jobs, console) as display, made as running:
        while running.busy or (waiting and not running.stopping):
            while running.idle and waiting and not running.stopping:
                running.submit(waiting.pop())
            for message in running.messages(timeout=0.2):
                job = message.job
                if message.kind == "steps":
                    display.advance(job.name, message.content)
                elif message.kind == "done":
                    on_done(job, message.content)
                    display.finish(job.name)
                elif message.kind == "failed":
                    error, details = message.content
                    report = folder / f"{job.name}.failed.txt"
                    files.write_atomically(report, details)
                    failures.append(f"the run {job.name} failed ({error}; see {report})")
                elif message.kind == "died" and not running.stopping:
                    files.write_atomically(folder / f"{job.name}.failed.txt", f"{message.content}\n")
                    failures.append(f"the run {job.name} failed ({message.content})")
        stopped = running.stopping
    if failures:
        raise ChildProcessError("; ".join(failures) + ". The others were done or saved")
    if stopped:
        raise InterruptedError(STOPPED)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_symlink():
        return
    for left in folder.glob("*.part"):
        left.unlink()  # of a process that was killed while it wrote
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _check_number(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"a sweep needs at least 1 worker, got {workers}")


@dataclass
class _Display:
    """A progress bar over all steps of all jobs; occasional lines where there is no terminal."""

    jobs: Sequence[Job[Any]]
    console: Console
    done: dict[str, int] = field(default_factory=dict[str, int])
    finished: int = 0

    def __enter__(self) -> _Display:
        self._total = sum(job.steps for job in self.jobs)
        self._steps = {job.name: job.steps for job in self.jobs}
        self._first: dict[str, int] = {}
        self._started = self._printed = time.monotonic()
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
        self._first.setdefault(name, steps)
        self.done[name] = max(steps, self.done.get(name, 0))
        self._bar.update(self._task, completed=sum(self.done.values()), description=self._description())

    def finish(self, name: str) -> None:
        self.finished += 1
        self.advance(name, self._steps[name])
        now = time.monotonic()
        due = now - self._printed > LINE_SECONDS or self.finished == len(self.jobs)
        if not self.console.is_terminal and due:
            self._printed = now
            elapsed = now - self._started
            made = sum(self.done.values()) - sum(self._first.values())
            left = (self._total - sum(self.done.values())) * elapsed / made if made else 0.0
            say(
                self.console,
                f"{self.finished}/{len(self.jobs)} runs, {name} done, {elapsed / 60:.1f} minutes, "
                f"about {left / 60:.1f} left",
            )

    def _description(self) -> str:
        return f"{self.finished}/{len(self.jobs)} runs"
