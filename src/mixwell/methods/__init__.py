"""Every method of the field as one short recipe; each module registers its methods."""

from __future__ import annotations

import difflib

from mixwell.methods.base import (
    Extra,
    Method,
    MethodContext,
    Needs,
    Options,
    Outcome,
    Stages,
    Trial,
    register,
)
from mixwell.mixer.recipes import METHODS, Recipe

__all__ = [
    "Extra",
    "Method",
    "MethodContext",
    "Needs",
    "Options",
    "Outcome",
    "Recipe",
    "Stages",
    "Trial",
    "every",
    "find",
    "register",
]


def every() -> dict[str, Method]:
    """Return all methods by name, sorted.

    Example:
        >>> "doge" in every()
        True
    """
    return {name: find(name) for name in sorted(METHODS.names())}


def find(name: str) -> Method:
    """Return a method by its name, as ``mixwell methods`` lists it.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS.names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(METHODS.names()))}"
        raise ValueError(f"there is no method {name!r}; {hint}")
    method = METHODS.get(name)
    if not isinstance(method, Method):
        raise TypeError(f"{name!r} is registered as {method!r}, and runs need a mixwell.methods.Method")
    return method
