"""Runs commands in forked children of a process that has imported everything once; a script.

Each line of its input is a command as JSON: ``argv``, ``cwd``, ``stdin``, ``seconds``, ``memory`` (bytes). Each line of its output
is the status and the text that the command printed; the status is negative for a signal, and ``null`` for a command that was
killed because it took too long.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any


def import_everything() -> None:
    """Import what a command would import, so that children need not."""
    for name in ("datasets", "jinja2", "matplotlib.pyplot", "pyarrow.parquet", "tokenizers", "torch._dynamo"):
        importlib.import_module(name)  # optimizers import torch._dynamo with their first step
    importlib.import_module("mixwell.cli")
    for room in (
        "data", "hypergradient", "lab", "methods", "mixer", "reference", "report", "signals", "simplex", "training", "utils",
    ):  # fmt: skip
        package = importlib.import_module(f"mixwell.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # of an optional package
                importlib.import_module(found.name)
    sys.modules["torch"].set_num_threads(1)


def serve() -> None:
    """Answer one command after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a command in a child, and return its status and output."""
    folder = Path(asked["cwd"])
    printed = folder / ".printed"
    (folder / ".stdin").write_text(asked["stdin"])
    child = os.fork()
    if not child:
        run(asked, printed)
    end = time.monotonic() + asked["seconds"]
    status: int | None = None
    delay = 0.002
    while time.monotonic() < end:
        done, ended = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(ended)
            break
        time.sleep(delay)
        delay = min(delay * 1.5, 0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # also what it started
    if status is None:
        os.waitpid(child, 0)
    return {"status": status, "output": printed.read_bytes().decode(errors="replace")}


def run(asked: dict[str, Any], printed: Path) -> None:
    """Run a command in this process, which ends with it."""
    status = 1
    try:
        os.setsid()
        for name, number, flags in (
            (printed.with_name(".stdin"), 0, os.O_RDONLY),
            (printed, 1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            opened = os.open(name, flags, 0o600)
            os.dup2(opened, number)
        os.dup2(1, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(1, "w", closefd=False, errors="backslashreplace"),  # noqa: SIM115
            open(2, "w", closefd=False, errors="backslashreplace"),  # noqa: SIM115
        )
        os.chdir(asked["cwd"])
        os.environ["MIXWELL_CACHE"] = str(Path(asked["cwd"]) / "cache")
        pages = (
            int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
        )
        limit = pages * resource.getpagesize() + asked["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.resetwarnings()
        sys.argv = ["mixwell", *asked["argv"]]
        from mixwell.cli import main

        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


if __name__ == "__main__":
    import_everything()
    serve()
