"""Warnings that point at the user's own line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def warn_user(message: str) -> None:
    """Warn at the innermost line outside of mixwell, torch and ``contextlib``.

    A warning may arise in a hook or at the end of a block, at any depth below the user's call
    (``skip_file_prefixes`` of Python 3.12 does the same).
    """
    skipped = [_PACKAGE, contextlib.__file__]
    if "torch" in sys.modules:  # not imported here, because parts of the package do without it
        skipped.append(os.path.dirname(sys.modules["torch"].__file__ or ""))
    level, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tuple(skipped)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
