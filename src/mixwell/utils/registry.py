"""Registries: components that are found by name or by type, and that others may add without editing the package.

A package outside of mixwell registers its components when it is imported. List its module under the entry point
group ``mixwell.plugins`` and every command imports it before the first lookup::

    [project.entry-points."mixwell.plugins"]
    mine = "my_package.mixwell_components"
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import Generic, TypeVar, cast, final

T = TypeVar("T")
Registered = TypeVar("Registered")
PLUGINS = "mixwell.plugins"


@cache
def load_plugins() -> None:
    """Import the modules of the entry point group ``mixwell.plugins``, once."""
    for entry in metadata.entry_points(group=PLUGINS):
        entry.load()


class _Components:
    """What both registries share: built-in modules and plugins are imported at the first lookup.

    Args:
        kind: the noun that messages use, such as ``"logger"``.
        package: the package with the modules that register the built-in components, each imported at the first
            lookup, so that a new one is one file and the owner of the registry does not depend on it.
    """

    def __init__(self, kind: str, *, package: str | None = None) -> None:
        self.kind, self._package = kind, package
        self._loaded = False

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True  # first, because the modules may look up while they are imported
        if self._package is not None:
            package = import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                import_module(f"{self._package}.{module.name}")
        load_plugins()


@final
class Registry(_Components, Generic[T]):
    """Components by name.

    Example:
        >>> fruits = Registry[int]("fruit")
        >>> fruits.add("apple", 3)
        >>> fruits.get("apple"), fruits.names()
        (3, ('apple',))
        >>> fruits.get("pear")
        Traceback (most recent call last):
        ValueError: unknown fruit 'pear'; available: apple
    """

    def __init__(self, kind: str, *, package: str | None = None) -> None:
        super().__init__(kind, package=package)
        self._found: dict[str, T] = {}

    def add(self, name: str, component: T) -> None:
        """Add a component; refuse a name that another component has."""
        if self._found.get(name, component) is not component:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._found[name] = component

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a decorator that adds a component, a ``T``, and keeps its own type."""

        def decorate(component: Registered) -> Registered:
            self.add(name, cast("T", component))
            return component

        return decorate

    def get(self, name: str) -> T:
        """Return the component of a name; where there is none, raise ``ValueError`` with the names there are."""
        self._load()
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # it is from a user's file
            raise ValueError(
                f"the name of a {self.kind} must be text, got {name!r}; available: {', '.join(self.names())}"
            )
        if name not in self._found:
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"unknown {self.kind} {name!r}; {hint}available: {', '.join(self.names())}")
        return self._found[name]

    def names(self) -> tuple[str, ...]:
        """Return the names of all components, in the order of registration."""
        self._load()
        return tuple(self._found)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._found


@final
class TypeRegistry(_Components, Generic[T]):
    """Components by the type of the object that they serve; a subclass is served by its nearest base.

    Example:
        >>> sizes = TypeRegistry[str]("size")
        >>> sizes.register(int)("small")
        'small'
        >>> sizes.find(True), sizes.find(1.5)
        ('small', None)
    """

    def __init__(self, kind: str, *, package: str | None = None) -> None:
        super().__init__(kind, package=package)
        self._found: dict[type, T] = {}

    def register(self, *served: type) -> Callable[[T], T]:
        """Return a decorator that adds a component for some types. A later registration of the same type wins."""

        def decorate(component: T) -> T:
            self._found.update(dict.fromkeys(served, component))
            return component

        return decorate

    def find(self, instance: object) -> T | None:
        """Return the component for an object, ``None`` where neither its type nor a base is registered."""
        self._load()
        return next((self._found[one] for one in type(instance).__mro__ if one in self._found), None)

    def types(self) -> tuple[type, ...]:
        """Return the registered types."""
        self._load()
        return tuple(self._found)
