"""Many independent runs by the workers of an engine, with progress, stopped and continued at will."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mixwell.training.engines import LOCAL, Engine, Job, Work
from mixwell.utils import files
from mixwell.utils.terminal import say

Payload = TypeVar("Payload")
Result = TypeVar("Result")
LINE_SECONDS = 15.0


def check_workers(workers: int | None, engine: Engine = LOCAL) -> None:
    """Refuse workers that cannot be, before anything is written.

    Args:
        workers: how many; ``None`` for one per core.

    Raises:
        ValueError: the number is below one, or the engine is not installed.
        OSError: the engine does not answer.
    """
    _check_number(workers)
    engine.check()


def run_sweep(
    work: Work[Payload, Result],
    jobs: Sequence[Job[Payload]],
    *,
    workers: int | None,
    checkpoints: Path,
    on_done: Callable[[Job[Payload], Result], None],
    console: Console | None = None,
    engine: Engine = LOCAL,
) -> None:
    """Run all jobs, some at a time.

    Every job has a checkpoint in a folder, so an interrupted sweep continues where it stopped when the same
    jobs are given again (without those that have results). Checkpoints of finished jobs are removed. A
    job that fails does not keep the others from being done.

    Args:
        work: does one job, in a process with one thread.
        workers: how many runs at a time; ``None`` for one per core, of a cluster's where the engine has one.
        on_done: called with each result in this process, as it arrives.
        console: for the progress bar; a line now and then where it is not a terminal.
        engine: where the jobs are done. A sweep that was begun with one may be resumed with another.

    Raises:
        ValueError: there are no workers, or the engine is not installed.
        InterruptedError: by Ctrl-C or SIGTERM, after the workers saved.
        ChildProcessError: jobs failed; the others are done.
        OSError: the engine does not answer, or its workers cannot start.
    """
    _check_number(workers)
    if not jobs:
        _remove_if_empty(checkpoints)  # a sweep that was stopped just after its last job left it
        return
    checkpoints.mkdir(parents=True, exist_ok=True)
    waiting, failures = list(reversed(jobs)), list[str]()
    console = console or Console()
    made = engine.workers(
        work, count=workers, jobs=len(jobs), folder=checkpoints, say=lambda text: say(console, text)
    )
    with _Display(jobs, console) as display, made as running:
        while running.busy or (waiting and not running.stopping):
            while running.idle and waiting and not running.stopping:
                job = waiting.pop()
                running.give(job, _checkpoint(checkpoints, job))
            for answer in running.answers(timeout=0.2):
                job = answer.job
                if answer.kind == "steps":
                    display.advance(job.name, answer.content)
                elif answer.kind == "done":
                    on_done(job, answer.content)
                    _checkpoint(checkpoints, job).unlink(missing_ok=True)
                    display.finish(job.name)
                elif answer.kind == "failed":
                    message, where = answer.content
                    report = checkpoints / f"{job.name}.failed.txt"
                    files.write(report, where)
                    failures.append(f"the run {job.name} failed ({message}; see {report})")
                elif answer.kind == "died" and not running.stopping:
                    files.write(checkpoints / f"{job.name}.failed.txt", f"{answer.content}\n")
                    failures.append(f"the run {job.name} failed ({answer.content})")
        stopped = running.stopping
    if failures:
        raise ChildProcessError("; ".join(failures) + ". The others were done or saved")
    if stopped:
        raise InterruptedError("stopped; the same command continues where this one left off")
    _remove_if_empty(checkpoints)


def _remove_if_empty(checkpoints: Path) -> None:
    for left in checkpoints.glob("*.part"):
        left.unlink()  # of a process that was killed while it wrote
    if checkpoints.exists() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


def begun(checkpoints: Path, jobs: Sequence[Job[Any]]) -> int:
    """How many jobs have a checkpoint to continue from."""
    return sum(_checkpoint(checkpoints, job).exists() for job in jobs)


def _check_number(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ValueError(f"a sweep needs at least 1 worker, got {workers}")


def _checkpoint(folder: Path, job: Job[Any]) -> Path:
    return folder / f"{job.name}.safetensors"


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
