"""Work for the tests of sweeps, in a module that worker processes can import."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mixwell.engines import StoppedError


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
