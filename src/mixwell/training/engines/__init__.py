"""Where the runs of a sweep are executed: processes on this machine, or Ray.

:class:`Engine` names one and makes its workers; ``base.py`` has their common interface, and each kind has its own
module. Ray is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

from mixwell.training.engines.base import Job, Message, Payload, StoppedError, Work, Workers
from mixwell.training.engines.local import LocalWorkers, cores

NAMES = ("local", "ray")

__all__ = ["LOCAL", "NAMES", "Engine", "Job", "Message", "StoppedError", "Work", "Workers", "cores"]


@final
@dataclass(frozen=True)
class Engine:
    """Where runs are executed.

    Args:
        name: ``"local"``, processes on this machine, or ``"ray"``.
        address: address of an existing Ray cluster: ``"host:port"`` of its head, or ``"auto"`` for the one that
            this machine belongs to. The default is ``$RAY_ADDRESS``; without it a local Ray instance is started
            and shut down.

    Raises:
        ValueError: There is no such engine, or it takes no address.

    Example:
        >>> Engine("ray", "head:6379")
        Engine(name='ray', address='head:6379')
    """

    name: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"the engine must be {' or '.join(NAMES)}, got {self.name!r}")
        if self.address is not None and self.name != "ray":
            raise ValueError(
                f"--ray-address {self.address} is for --engine ray, and the engine is {self.name}; give that, or "
                "no address"
            )

    def check(self) -> None:
        """Raise if the engine cannot be used, before anything is written.

        Raises:
            ValueError: Ray is not installed.
            OSError: No cluster answers at the address.
        """
        if self.name == "ray":
            _ray_module("connection").check_reachable(self.address)

    def workers(
        self,
        work: Work[Payload, Any],
        *,
        count: int | None,
        jobs: int,
        folder: Path,
        say: Callable[[str], None],
    ) -> Workers[Payload]:
        """Return workers for a sweep, which start when their context is entered.

        Args:
            count: number of workers; ``None`` for one per core (of the cluster, if there is one).
            jobs: number of jobs, which is also the maximum number of workers.
            folder: a folder that all workers must see.
            say: called with messages to the user.

        Raises:
            ValueError: Ray is not installed.
        """
        if self.name == "ray":
            return _ray_module("ray").RayWorkers(
                work, count=count, jobs=jobs, folder=folder, address=self.address, say=say
            )
        return LocalWorkers(work, min(count or cores(), jobs))


LOCAL = Engine()
"""Processes on this machine."""


def _ray_module(module: str) -> Any:
    try:
        return import_module(f"mixwell.training.engines.{module}")
    except ImportError as error:
        raise ValueError(
            f"the engine ray needs Ray ({error}): pip install 'mixwell[ray]'; or give --engine local"
        ) from error
