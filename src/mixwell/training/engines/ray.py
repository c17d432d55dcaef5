"""Workers that are Ray actors, on this machine or on a cluster. Needs the extra ``mixwell[ray]``."""

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
    Job,
    Message,
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
"""Environment variables that are forwarded to workers on a cluster; those on this machine have all."""
# Ray is only partly typed.
_remote: Any = ray.remote
_pickle: Any = cloudpickle
_result: Any = ray.get


@final
@dataclass
class _Worker(Generic[Payload]):
    """The driver's view of an actor."""

    actor: Any
    ready: bool = False
    job: Job[Payload] | None = None


@final
class RayWorkers(Workers[Payload]):
    """A pool of actors with one CPU and one thread each.

    An actor waits until a CPU is free; the others get the jobs. If this process dies, Ray ends the actors. The
    arguments are those of :meth:`mixwell.training.engines.Engine.workers`.
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
        self._stop = self._stop_sent = False
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
        # `messages` forwards it: a signal handler may interrupt a call to Ray.
        self._stop = True

    @override
    def submit(self, job: Job[Payload]) -> None:
        worker = next(one for one in self._workers if one.ready and one.job is None)
        worker.job = job
        self._asked[worker.actor.run.remote(job.setting)] = "run", worker, job
        self._ask_steps(worker)

    @override
    def messages(self, *, timeout: float) -> Iterator[Message[Payload]]:
        if self._stop and not self._stop_sent:
            self._stop_sent = True
            for worker in self._workers:
                worker.actor.stop.remote()
        self._report_waiting()
        for ref in ray.wait(list(self._asked), timeout=timeout)[0]:
            asked, worker, job = self._asked.pop(ref)
            if asked == "start":
                self._on_start(worker, ref)
            elif job is not None and worker.job is job:
                kind, content = self._received(asked, ref)
                if kind == "steps":
                    self._ask_steps(worker)
                else:
                    worker.job = None
                if kind == "died":
                    self._replace(worker)
                yield Message(kind, job, content)

    @override
    def _open(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(connected(self._address, cpus=min(self._count or cores(), self._most)))
            # A cluster that grows on demand may have no CPU yet.
            cpus = max(1, int(ray.cluster_resources().get("CPU", 0)))
            self._token = self._folder / f".{uuid.uuid4().hex}.part"
            opened.callback(self._token.unlink, missing_ok=True)
            files.write_atomically(self._token, self._token.name)
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
        here = _DriverState(
            token=str(self._token),
            packages=environment.packages(),
            folder=os.getcwd(),
            path=[os.path.abspath(one) for one in sys.path],
            argv=sys.argv,
            work=_pickle.dumps(self._work),
        )
        self._asked[worker.actor.start.remote(here)] = "start", worker, None

    def _on_start(self, worker: _Worker[Payload], ref: Any) -> None:
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

    def _received(self, asked: str, ref: Any) -> tuple[str, Any]:
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

    def _report_waiting(self) -> None:
        """Tell the user, once, if no worker has started yet."""
        if any(one.ready for one in self._workers) or time.monotonic() < self._patient_until:
            return
        free = ray.available_resources().get("CPU", 0)
        self._say(f"waiting for Ray to start workers: {free:g} CPUs of the cluster are free")
        self._patient_until = math.inf


@final
@dataclass(frozen=True)
class _DriverState:
    """The state that a child process would inherit from this one.

    Args:
        token: a file in the sweep's folder, containing its own name; shows whether a machine sees the folder.
        packages: versions by name.
        folder: the working directory.
        path: ``sys.path``.
        argv: ``sys.argv``.
        work: pickled, since its module may be importable only with that path.
    """

    token: str
    packages: dict[str, str]
    folder: str
    path: list[str]
    argv: list[str]
    work: bytes


class _Actor:
    """A worker: one thread does the job while two threads of the concurrency group "talk" respond."""

    def __init__(self) -> None:
        self._done, self._stop = 0, False

    def start(self, here: _DriverState) -> str | None:
        """Prepare for jobs; return what is wrong, if anything."""
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
        sys.argv = here.argv
        sys.path.extend(one for one in here.path if one not in sys.path)
        with suppress(OSError):
            os.chdir(here.folder)
        self._work: Work[Any, Any] = _pickle.loads(here.work)
        return None

    def run(self, setting: Any) -> tuple[str, Any]:
        """Do a job."""
        self._done = 0
        return attempt(self._work, setting, report=self._report, stopping=lambda: self._stop)

    @ray.method(concurrency_group="talk")
    def steps(self) -> int:
        """Return the number of steps done, after a while."""
        time.sleep(REPORT_SECONDS)
        return self._done

    @ray.method(concurrency_group="talk")
    def stop(self) -> None:
        """Ask the job to stop."""
        self._stop = True

    def _report(self, steps: int) -> None:
        self._done = steps
