"""Work for the tests of sweeps, in a module that worker processes can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mixwell.mixer import state
from mixwell.training.engines import StoppedError


def count(setting: int, /, *, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Count to the setting."""
    for done in range(1, setting + 1):
        report(done)
        if stopping():
            raise StoppedError
    return setting, os.environ["OMP_NUM_THREADS"], os.getpid()


def descend(
    setting: tuple[int, Path], /, *, report: Callable[[int], None], stopping: Callable[[], bool]
) -> tuple[int, list[float], int]:
    """Noisy descent that continues from its own checkpoint; returns first step, parameters and thread count.

    While there is a file ``hold``, it waits after half of the steps to be stopped.
    """
    steps, folder = setting
    checkpoint = folder / "descent.safetensors"
    random = torch.Generator().manual_seed(steps)
    place, begun = torch.randn(5, generator=random), 0
    if checkpoint.exists():
        saved = state.read(checkpoint)
        begun, place = saved["steps"], saved["tensors"]["place"]
        random.set_state(saved["tensors"]["random"])
    for step in range(begun, steps):
        place = place - 0.1 * (torch.sin(place) + torch.randn(5, generator=random))
        report(step + 1)
        (folder / "begun").touch()
        while step == steps // 2 and (folder / "hold").exists() and not stopping():
            time.sleep(0.01)
        if stopping():
            tensors = {"place": place, "random": random.get_state()}
            state.write_file(checkpoint, {"steps": step + 1, "tensors": tensors})
            raise StoppedError
    return begun, place.tolist(), torch.get_num_threads()


def where(setting: tuple[int, Path], /, *, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Return facts about the process, after waiting until that many are at work."""
    count, folder = setting
    at_work = folder / "at-work"
    at_work.mkdir(exist_ok=True)
    (at_work / str(os.getpid())).touch()
    while len(list(at_work.iterdir())) < count and not stopping():
        time.sleep(0.01)
    return os.getpid(), os.getcwd(), os.environ.get("CLUSTER"), os.environ.get("MIXWELL_CACHE")


def fail(setting: tuple[int, Path], /, *, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that fails, or dies, or takes its time."""
    steps, folder = setting
    if steps == 0:
        raise ValueError("this one is broken")
    if steps == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if steps == 3:  # waits for another to be at work
        while not (folder / "long.txt").exists():
            time.sleep(0.01)
        return steps
    if steps > 1000:
        (folder / "long.txt").write_text("at work")
    for _ in range(steps):
        time.sleep(0.01)
        if stopping():
            (folder / "long.txt").write_text("saved")
            raise StoppedError
    return steps
