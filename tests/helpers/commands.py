"""The command line, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from mixwell.cli import main

PATIENCE = 1800
"""Seconds after which a process hangs, however slow and busy the machine is. No test waits for them to pass."""


def command(*args: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Begin `mixwell ...` in a process of its own, with a cache of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mixwell", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "MIXWELL_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def mixwell(*args: str | Path, cwd: Path, status: int = 0, cache: str | None = "cache") -> tuple[str, str]:
    """Run `mixwell ...` to its end in this process, expect an exit status, and give what it printed.

    Its cache is a folder in ``cwd``, or the user's if ``cache`` is ``None``.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        patch.chdir(cwd)
        if cache is not None:
            patch.setenv("MIXWELL_CACHE", str(cwd / cache))
        patch.setattr(sys, "argv", ["mixwell", *map(str, args)])
        patch.setattr(sys, "path", [*sys.path])
        known = set(sys.modules)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = 1
            traceback.print_exc()
        for name in (
            set(sys.modules) - known
        ):  # a user's own modules, which another test has under the same name
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(cwd)):
                del sys.modules[name]
    assert code == status, (code, out.getvalue(), err.getvalue())
    return out.getvalue(), err.getvalue()
