"""Workers that are actors of Ray, on this machine or on a cluster. Needs the extra ``mixwell[ray]``."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, final

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from typing_extensions import override

from mixwell.training.engines.base import (
    DIED,
    REPORT_SECONDS,
    Answer,
    Job,
    Payload,
    Work,
    Workers,
    attempt,
)
from mixwell.training.engines.connection import connected, last_line
from mixwell.training.engines.local import cores
from mixwell.utils import environment, files

WAIT_SECONDS = 15.0
PASSED_ON = ("MIXWELL_CACHE",)
"""Variables that workers of a cluster get from this process; those on this machine have all."""
# Ray is typed in part only.
_remote: Any = ray.remote
_pickle: Any = cloudpickle
_result: Any = ray.get


@final
@dataclass
class _Worker(Generic[Payload]):
    """An actor, as the driver sees it.

    Args:
        actor: its handle.
        ready: whether it has started.
        job: that it is at work on.
    """

    actor: Any
    ready: bool = False
    job: Job[Payload] | None = None


@final
class RayWorkers(Workers[Payload]):
    """Some actors that do jobs, each with one CPU and one thread.

    An actor that no CPU is free for waits; the others get the jobs. If this process dies, Ray ends the actors.

    Args:
        work: does one job.
        count: of the actors; ``None`` for one per CPU.
        jobs: how many there are to do.
        folder: of the checkpoints, which all machines must see.
        address: as of :class:`mixwell.training.engines.Engine`.
        say: called with a line for the user.
    """

    def __init__(
        self,
        work: Work[Payload, Any],
        *,
        count: int | None,
        jobs: int,
        folder: Path,
        address: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._work, self._count, self._most = work, count, jobs
        self._folder, self._address, self._say = folder.absolute(), address, say
        self._workers: list[_Worker[Payload]] = []
        self._asked: dict[Any, tuple[str, _Worker[Payload], Job[Payload] | None]] = {}
        self._stop = self._told_to_stop = False
        self._patient_until = math.inf

    @property
    @override
    def stopping(self) -> bool:
        return self._stop

    @property
    @override
    def busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    @property
    @override
    def idle(self) -> int:
        return sum(worker.ready and worker.job is None for worker in self._workers)

    @override
    def stop(self) -> None:
        """Ask all to save and stop; seen when answers are asked for, since signals come at any moment."""
        self._stop = True

    @override
    def give(self, job: Job[Payload], checkpoint: Path) -> None:
        worker = next(one for one in self._workers if one.ready and one.job is None)
        worker.job = job
        self._asked[worker.actor.run.remote(job.setting, str(checkpoint.absolute()))] = "run", worker, job
        self._ask_steps(worker)

    @override
    def answers(self, *, timeout: float) -> Iterator[Answer[Payload]]:
        """What the workers say, as far as they have said something. One that died is replaced.

        Args:
            timeout: in seconds, to wait for the first.

        Yields:
            Answers.

        Raises:
            OSError: a worker cannot start.
        """
        if self._stop and not self._told_to_stop:
            self._told_to_stop = True
            for worker in self._workers:
                worker.actor.stop.remote()
        self._tell_of_waiting()
        for ref in ray.wait(list(self._asked), timeout=timeout)[0]:
            asked, worker, job = self._asked.pop(ref)
            if asked == "start":
                self._note_start(worker, ref)
            elif job is not None and worker.job is job:
                kind, content = self._heard(asked, ref)
                if kind == "steps":
                    self._ask_steps(worker)
                else:
                    worker.job = None
                if kind == "died":
                    self._replace(worker)
                yield Answer(kind, job, content)

    @override
    def _open(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(connected(self._address, cpus=min(self._count or cores(), self._most)))
            # A cluster that grows on demand may have no CPU yet.
            cpus = max(1, int(ray.cluster_resources().get("CPU", 0)))
            self._token = self._folder / f".{uuid.uuid4().hex}.part"
            opened.callback(self._token.unlink, missing_ok=True)
            files.write(self._token, self._token.name)
            self._patient_until = time.monotonic() + WAIT_SECONDS
            for _ in range(min(self._count or cpus, self._most)):
                self._start()
            self._opened = opened.pop_all()

    @override
    def _close(self) -> None:
        with self._opened:
            for worker in self._workers:
                ray.kill(worker.actor)

    def _start(self) -> None:
        variables = {"OMP_NUM_THREADS": "1"}
        variables |= {name: os.path.abspath(os.environ[name]) for name in PASSED_ON if os.environ.get(name)}
        made = _remote(num_cpus=1, concurrency_groups={"talk": 2})(_Actor)
        worker = _Worker[Payload](made.options(runtime_env={"env_vars": variables}).remote())
        self._workers.append(worker)
        here = _Here(
            token=str(self._token),
            packages=environment.packages(),
            folder=os.getcwd(),
            path=[os.path.abspath(one) for one in sys.path],
            words=sys.argv,
            work=_pickle.dumps(self._work),
        )
        self._asked[worker.actor.start.remote(here)] = "start", worker, None

    def _note_start(self, worker: _Worker[Payload], ref: Any) -> None:
        try:
            problem: str | None = _result(ref)
        except RayError as error:
            problem = (
                f"a worker on Ray could not start ({last_line(str(error))}); see that the cluster is up, and the "
                "same mixwell installed on all of its machines"
            )
        if problem is None:
            worker.ready = True
        elif not self._stop:
            raise OSError(problem)

    def _ask_steps(self, worker: _Worker[Payload]) -> None:
        self._asked[worker.actor.steps.remote()] = "steps", worker, worker.job

    def _heard(self, asked: str, ref: Any) -> tuple[str, Any]:
        try:
            return _result(ref) if asked == "run" else ("steps", _result(ref))
        except RayActorError:
            return "died", DIED
        except RayError as error:  # a result that cannot be sent
            return "failed", (last_line(str(error)), str(error))

    def _replace(self, worker: _Worker[Payload]) -> None:
        self._workers.remove(worker)
        if not self._stop:
            self._start()

    def _tell_of_waiting(self) -> None:
        """Once, where none has started yet."""
        if any(one.ready for one in self._workers) or time.monotonic() < self._patient_until:
            return
        free = ray.available_resources().get("CPU", 0)
        self._say(f"waiting for Ray to start workers: {free:g} CPUs of the cluster are free")
        self._patient_until = math.inf


@final
@dataclass(frozen=True)
class _Here:
    """What a process that was started by this one would have from it.

    Args:
        token: a file in the folder of the checkpoints, that has its own name in it.
        packages: and their versions.
        folder: the working directory.
        path: where modules are.
        words: of the command.
        work: pickled, since its module may be found only by that path.
    """

    token: str
    packages: dict[str, str]
    folder: str
    path: list[str]
    words: list[str]
    work: bytes


class _Actor:
    """A worker: one thread is at work, two others of the group "talk" answer meanwhile."""

    def __init__(self) -> None:
        self._done, self._stop = 0, False

    def start(self, here: _Here) -> str | None:
        """Get ready, or say what is wrong."""
        import torch

        torch.set_num_threads(1)
        token, name = Path(here.token), socket.gethostname()
        if not token.exists() or token.read_text(encoding="utf-8") != token.name:
            return (
                f"the worker on {name} does not see {token.parent}: on a cluster give an --out on a file system "
                "that all of its machines share"
            )
        own = environment.packages()
        others = [
            f"{one} {own.get(one)} and not {known}"
            for one, known in here.packages.items()
            if own.get(one) != known
        ]
        if others:
            return f"the worker on {name} has {', '.join(others)}; install the same on all machines of the cluster"
        sys.argv = here.words
        sys.path.extend(one for one in here.path if one not in sys.path)
        with suppress(OSError):
            os.chdir(here.folder)
        self._work: Work[Any, Any] = _pickle.loads(here.work)
        return None

    def run(self, setting: Any, checkpoint: str) -> tuple[str, Any]:
        """Do a job."""
        self._done = 0
        return attempt(
            self._work,
            setting,
            checkpoint=Path(checkpoint),
            report=self._report,
            stopping=lambda: self._stop,
        )

    @ray.method(concurrency_group="talk")
    def steps(self) -> int:
        """How many are done, after a while."""
        time.sleep(REPORT_SECONDS)
        return self._done

    @ray.method(concurrency_group="talk")
    def stop(self) -> None:
        """Ask to save and stop."""
        self._stop = True

    def _report(self, steps: int) -> None:
        self._done = steps
