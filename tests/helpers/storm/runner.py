"""The process that runs the cases, and the classes of their outcomes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self, final

from helpers.storm import server
from helpers.storm.cases import Case, Outcome, Result

SECONDS = 20.0
"""After which a command hangs: each takes half a second of one core, on a busy machine a few seconds."""
MEMORY = 2 << 30
"""Bytes of address space that a command may take in addition to those of the imported packages."""
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


@final
class Runner:
    """Runs cases one after the other, each in a folder of its own.

    Args:
        folder: for the folders of the cases.
    """

    def __init__(self, folder: Path, *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._folder, self._seconds, self._memory = folder, seconds, memory
        self._number = 0

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        self._server = subprocess.Popen(
            [sys.executable, server.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def run(self, case: Case) -> Result:
        """Write the files of a case, run its command, and classify how it ended."""
        self._number += 1
        cwd = self._folder / f"case{self._number}"
        cwd.mkdir(parents=True)
        try:
            argv = [str(one) for one in case.write(cwd)]
            asked = {
                "argv": argv,
                "cwd": str(cwd),
                "stdin": case.stdin,
                "seconds": self._seconds,
                "memory": self._memory,
            }
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            answered = json.loads(self._server.stdout.readline())
        finally:
            shutil.rmtree(cwd, ignore_errors=True)
        status, output = answered["status"], answered["output"]
        return Result(
            case,
            classify(status, output, raises_own=case.raises_own),
            -9 if status is None else status,
            output,
        )


def classify(status: int | None, output: str, *, raises_own: bool) -> Outcome:
    """Return the class of an outcome.

    Args:
        status: of the process; negative for a signal, ``None`` where it was killed after the time.
        raises_own: whether the traceback of a function of the user is right; ours is not even then.
    """
    if status is None:
        return "hang"
    if status < 0:
        return "abort"
    if _TRACEBACK.search(output):
        last = output.rindex("Traceback (most recent call last):")
        frames = re.findall(r'^  File "(.*)", line', output[last:], re.MULTILINE)
        # The user's function may raise in PyTorch; what counts is who called that.
        ours = [frame for frame in frames if "/mixwell/" in frame or frame.endswith("entries.py")]
        own = ours and ours[-1].endswith("entries.py")
        return "user traceback" if raises_own and own else "traceback"
    if status == 0:
        return "accepted"
    return "message" if output.strip() else "silent"
