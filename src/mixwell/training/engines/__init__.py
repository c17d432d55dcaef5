"""Where the runs of a sweep are done: processes on this machine, or Ray.

:class:`Engine` names one and makes its workers; what they have in common is in ``base.py``, each kind has a file
of its own. Ray is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

from mixwell.training.engines.base import Answer, Job, Payload, StoppedError, Work, Workers
from mixwell.training.engines.local import LocalWorkers, cores

NAMES = ("local", "ray")

__all__ = ["LOCAL", "NAMES", "Answer", "Engine", "Job", "StoppedError", "Work", "Workers", "cores"]


@final
@dataclass(frozen=True)
class Engine:
    """Where runs are done.

    Args:
        name: ``"local"``, processes on this machine, or ``"ray"``.
        address: of a Ray cluster that is there: ``"host:port"`` of its head, or ``"auto"`` for the one that this
            machine is part of. By default ``$RAY_ADDRESS``, and where there is none a Ray of its own is started on
            this machine, and ended.

    Raises:
        ValueError: there is no such engine, or it has no address.

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
        """See that there is what it needs, before anything is written.

        Raises:
            ValueError: Ray is not installed.
            OSError: no cluster answers at the address.
        """
        if self.name == "ray":
            _of_ray("connection").check(self.address)

    def workers(
        self,
        work: Work[Payload, Any],
        *,
        count: int | None,
        jobs: int,
        folder: Path,
        say: Callable[[str], None],
    ) -> Workers[Payload]:
        """Workers for a sweep, which start when their context is entered.

        Args:
            count: how many workers; ``None`` for one per core, of a cluster's where there is one.
            jobs: how many there are to do; there are no more workers than these.
            folder: of the checkpoints, which all workers must see.

        Raises:
            ValueError: Ray is not installed.
        """
        if self.name == "ray":
            return _of_ray("ray").RayWorkers(
                work, count=count, jobs=jobs, folder=folder, address=self.address, say=say
            )
        return LocalWorkers(work, min(count or cores(), jobs))


LOCAL = Engine()
"""Processes on this machine."""


def _of_ray(module: str) -> Any:
    try:
        return import_module(f"mixwell.training.engines.{module}")
    except ImportError as error:
        raise ValueError(
            f"the engine ray needs Ray ({error}): pip install 'mixwell[ray]'; or give --engine local"
        ) from error
