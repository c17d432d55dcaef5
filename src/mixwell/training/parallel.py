"""A run in several processes, as ``torchrun`` starts them: joining, sharing a model, stopping together."""

from __future__ import annotations

import gc
import itertools
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

import torch
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixwell import distributed, methods
from mixwell.utils import environment
from mixwell.utils.sections import ConfigSection

if TYPE_CHECKING:
    from mixwell.training.config import Config

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# A process can be no more than one step before another, as each step's gradients are those of all.
AHEAD = 2
_RUNS = itertools.count()


class ParallelConfig(ConfigSection):
    """Several processes, as `torchrun` starts them."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each process has the whole model. `fsdp`: each has a shard of every parameter (`fully_shard`)."""
    find_unused_parameters: bool = False
    """Whether some parameters may have no gradient in a step (`find_unused_parameters` of DDP)."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a run stops where another process does not answer."""


def restarted(settings: Path) -> bool:
    """Return whether ``torchrun --max-restarts`` has restarted the processes of this run after one died.

    Args:
        settings: the config in the run's directory, the file that is written first.
    """
    if int(os.environ.get(RESTARTS, "0")) < 1 or not settings.exists():
        return False
    # A process may also have died between writing this file and the next.
    written = (settings.parent / environment.FILE).exists()
    return not written or environment.read(settings.parent).get("job") == environment.job()


@contextmanager
def joined(config: Config) -> Generator[None]:
    """Join the process group where ``torchrun`` has started several processes, and leave it at the end.

    Raises:
        ValueError: all of them would compute on the same device.
        ConnectionError: one of them died or did not answer in time.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or torch.distributed.is_initialized():
        yield
        return
    settings = config.parallel
    if ":" in config.device:
        raise ValueError(
            f"device: {config.device} is one device, and there are {os.environ['WORLD_SIZE']} processes; use "
            "auto, cuda or cpu, and each takes the device of its number"
        )
    cuda = config.device in ("auto", "cuda") and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=settings.timeout)
    with _explained(settings):
        store, rank, count = next(rendezvous("env://", timeout=limit))
        # Apart from the keys of the processes before a restart, which have dead addresses.
        store = PrefixStore(f"mixwell/{os.environ.get(RESTARTS, 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
        distributed.set_object_group(torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1)))
        yield
    # Not where something failed, since it would wait for processes that are gone. PyTorch may abort where a model
    # of DistributedDataParallel is still there afterwards.
    gc.collect()
    distributed.set_object_group(None)
    torch.distributed.destroy_process_group()


@contextmanager
def _explained(settings: ParallelConfig) -> Generator[None]:
    """Explain the errors that PyTorch raises where another process is gone."""
    try:
        yield
    except (torch.distributed.DistError, RuntimeError) as error:
        if "finished reduction in the prior iteration" in str(error):
            raise ValueError(
                "some parameters have no gradient in a step, for which DistributedDataParallel waits in vain: set "
                "parallel.find_unused_parameters: true, or freeze them"
            ) from error
        lost = isinstance(error, torch.distributed.DistError) or any(
            sign in str(error)
            for sign in ("gloo", "NCCL", "Connection", "Broken pipe", "timed out", "Timed out")
        )
        if not lost:
            raise
        reason = re.sub(r"\[[^\]]*\.cc:\d+\] |\. This is typically.*", "", str(error).splitlines()[0])
        raise ConnectionError(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} lost the others: one died, or did not "
            f"answer within {settings.timeout:g} s (parallel.timeout). The run stops ({reason}); `mixwell resume` "
            "with as many processes or with others, or torchrun --max-restarts, continues from its last checkpoint"
        ) from error


def wrap_model(model: nn.Module, settings: ParallelConfig) -> nn.Module:
    """Return a model wrapped for data parallelism; the model itself in a single process, or sharded in place.

    All ranks start from rank 0's parameters. With ``fsdp``, layers in an ``nn.ModuleList`` (the blocks of a
    transformer) are gathered one at a time.
    """
    if distributed.is_single_process():
        return model
    if settings.strategy == "ddp":
        device = next(model.parameters()).device
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=settings.find_unused_parameters,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            torch.distributed.broadcast(tensor, 0)
    mesh = init_device_mesh(next(model.parameters()).device.type, (distributed.world_size(),))
    for part in reversed(list(model.modules())):  # those inside of others first
        if isinstance(part, nn.ModuleList):
            for block in part:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_possible(config: Config, *, validation: int) -> None:
    """Raise ValueError for settings that several processes cannot train with.

    Args:
        validation: rows of a validation gradient; 0 where there is none.
    """
    count, method = distributed.world_size(), methods.find(config.mixer.method)
    if count == 1:
        return
    if method.stages is not None:
        raise ValueError(
            f"mixer.method: {method.name} trains other models first, which takes one process: train in one, or "
            "take the weights that such a run found (mixer: {method: fixed, weights: ...})"
        )
    if config.batch.rows % count:
        raise ValueError(
            f"batch.rows is {config.batch.rows}, which {count} processes cannot share evenly; make it a multiple"
        )
    if 0 < validation < count:
        raise ValueError(
            f"a validation gradient of {validation} rows cannot be shared by {count} processes; "
            "raise mixer.validation_rows, or give a larger validation set"
        )


@final
class StopCoordinator:
    """Lets ranks agree after which step to save or to stop, without waiting for each other.

    A rank that wants to writes a step that no rank has done yet into their common store.

    Args:
        stopping: returns whether this process was asked to stop.
    """

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._store: Any = None
        if not distributed.is_single_process():
            from torch.distributed.distributed_c10d import (
                PrefixStore,
                _get_default_store,  # pyright: ignore[reportPrivateUsage]
            )

            # Every run has its own keys; all ranks do the same runs in the same order.
            name = f"mixwell/run {next(_RUNS)}"
            self._store = PrefixStore(name, _get_default_store())
        self._asked = False
        self._save_at: int | None = None

    def stop_after(self, step: int) -> bool:
        """Return whether the run stops now; the same on all ranks at the same step."""
        if self._store is None:
            return self._stopping()
        if self._stopping() and not self._asked:
            self._asked = True
            self._store.compare_set("stop", "", str(step + AHEAD))
        return self._store.check(["stop"]) and step >= int(self._store.get("stop"))

    def save_after(self, step: int, *, due: bool) -> bool:
        """Return whether to write a checkpoint now; the same on all ranks at the same step.

        Args:
            due: whether it is time by this process's clock; that of rank 0 decides.
        """
        if self._store is None:
            return due
        if distributed.rank() == 0:
            now = self._save_at == step
            if now:
                self._save_at = None
            elif due and self._save_at is None:
                self._save_at = step + AHEAD
                self._store.set("save", str(self._save_at))
            return now
        return self._store.check(["save"]) and int(self._store.get("save")) == step
