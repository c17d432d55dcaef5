"""Python functions that a config names as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def call_entry_point(entry: str, arguments: Mapping[str, Any], *, base: Path, key: str) -> Any:
    """Import a function, call it, and return its result.

    Args:
        entry: ``module:function``. The module may also be a file in the config's folder.
        base: the config's folder.
        key: of the config, for messages.
    """
    function = _find(entry, base=base, key=key)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{key}: {entry} cannot be called with {dict(arguments)}: {error}") from error
    except ValueError:  # a built-in function may not say what it takes
        pass
    try:
        return function(**arguments)
    except SystemExit as error:
        raise ValueError(f"{key}: {entry} calls sys.exit({error.code!r}); let it return or raise") from error


def _find(entry: str, *, base: Path, key: str) -> Callable[..., Any]:
    module_name, colon, name = entry.partition(":")
    if not colon or not module_name or not name or module_name.startswith("."):
        raise ValueError(f"{key} must be module:function, got {entry!r}")
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}: cannot import {module_name!r} ({error}); it must be installed, or a file in {base}"
        ) from error
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"{key}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise ValueError(
            f"{key}: the module {module_name!r} calls sys.exit({error.code!r}) when it is imported; put what it "
            'runs below `if __name__ == "__main__":`'
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{key}: the module {module_name!r} has no function {name!r}")
    return function
