"""Compiled models and functions (``torch.compile``)."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def run_eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled models and functions run as if they were not compiled.

    So one model has two entry points: outside of the context the compiled code, inside of it the layers with their
    hooks. What was compiled stays valid, and nothing is compiled anew.
    """
    # Importing the compiler takes a second, and where nobody has imported it nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
