"""Work for the tests of sweeps, in a module that worker processes can import."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mixwell.mixer import state
from mixwell.training.engines import StoppedError


def count(setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that counts to its setting, and can continue."""
    done = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
    while done < setting:
        done += 1
        report(done)
        if stopping():
            checkpoint.write_text(json.dumps(done))
            raise StoppedError
    return done, os.environ["OMP_NUM_THREADS"], os.getpid()


def descend(
    setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]
) -> tuple[int, list[float], int]:
    """Noisy descent of so many steps, which can continue: where it began, where it ended, and its threads.

    While there is a file ``hold``, it waits after half of them to be stopped.
    """
    folder = checkpoint.parent.parent
    random = torch.Generator().manual_seed(setting)
    place, begun = torch.randn(5, generator=random), 0
    if checkpoint.exists():
        saved = state.read(checkpoint)
        begun, place = saved["steps"], saved["tensors"]["place"]
        random.set_state(saved["tensors"]["random"])
    for step in range(begun, setting):
        place = place - 0.1 * (torch.sin(place) + torch.randn(5, generator=random))
        report(step + 1)
        (folder / "begun").touch()
        while step == setting // 2 and (folder / "hold").exists() and not stopping():
            time.sleep(0.01)
        if stopping():
            tensors = {"place": place, "random": random.get_state()}
            state.write(checkpoint, {"steps": step + 1, "tensors": tensors})
            raise StoppedError
    return begun, place.tolist(), torch.get_num_threads()


def where(setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that tells of its process, and waits until so many are at work."""
    at_work = checkpoint.parent.parent / "at-work"
    at_work.mkdir(exist_ok=True)
    (at_work / str(os.getpid())).touch()
    while len(list(at_work.iterdir())) < setting and not stopping():
        time.sleep(0.01)
    return os.getpid(), os.getcwd(), os.environ.get("CLUSTER"), os.environ.get("MIXWELL_CACHE")


def fail(setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that fails, or dies, or takes its time."""
    if setting == 0:
        raise ValueError("this one is broken")
    if setting == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if setting == 3:  # waits for another to be at work
        while not list(checkpoint.parent.glob("*.safetensors")):
            time.sleep(0.01)
        return setting
    if setting > 1000:
        checkpoint.write_text("at work")
    for _ in range(setting):
        time.sleep(0.01)
        if stopping():
            checkpoint.write_text("saved")
            raise StoppedError
    return setting
