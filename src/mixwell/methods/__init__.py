"""Every method of the field as one short recipe; a module of this package that has ``METHODS`` is all it takes."""

from __future__ import annotations

import difflib
import pkgutil
from functools import cache
from importlib import import_module

from mixwell.methods.base import (
    Extra,
    Method,
    Needs,
    Options,
    Outcome,
    Recipe,
    Stages,
    Task,
    Trial,
)

__all__ = [
    "Extra",
    "Method",
    "Needs",
    "Options",
    "Outcome",
    "Recipe",
    "Stages",
    "Task",
    "Trial",
    "every",
    "find",
]


@cache
def every() -> dict[str, Method]:
    """All methods, by name, in the order of their names.

    Returns:
        The methods of every module of this package.

    Example:
        >>> "doge" in every()
        True
    """
    modules = [import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)]
    found: list[Method] = [method for module in modules for method in getattr(module, "METHODS", ())]
    return {method.name: method for method in sorted(found, key=lambda method: method.name)}


def find(name: str) -> Method:
    """A method by its name.

    Args:
        name: as ``mixwell methods`` lists it.

    Returns:
        The method.

    Raises:
        ValueError: there is none of that name.
    """
    known = every()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"there is no method {name!r}; {hint}")
    return known[name]
