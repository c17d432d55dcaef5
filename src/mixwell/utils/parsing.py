"""JSON, YAML and TOML that anyone may have written: of bounded depth and, with YAML's aliases, of bounded size."""

from __future__ import annotations

import json
import sys
import tomllib
from typing import Any

import yaml

MAX_DEPTH = 100
"""Levels of lists and mappings inside each other."""
MAX_NODES = 200_000
"""Values of a YAML document, each alias counted as what it stands for."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply, or has a number that is too long.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise ValueError(
            f"a number is too long to be read (more than {sys.get_int_max_str_digits()} digits)"
        ) from None


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML document.

    Raises:
        ValueError: it is not YAML, has a key twice, is nested more than :data:`MAX_DEPTH` levels deep, or has
            more than :data:`MAX_NODES` values.
    """
    try:
        return yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ValueError(text.replace('in "<unicode string>", line', "at line")) from error
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError) as error:
        # PyYAML's constructors of numbers, dates and the like raise what Python raises.
        raise ValueError(f"a value cannot be read ({error})") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the plain values of a TOML document.

    Raises:
        ValueError: it is not TOML, or is nested too deeply.
    """
    try:
        plain = tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None
    check_depth(plain)
    return plain


def check_depth(plain: Any) -> None:
    """Raise ``ValueError`` where lists and mappings are nested more than :data:`MAX_DEPTH` levels deep."""
    level = [plain]
    for _ in range(MAX_DEPTH):
        level = [
            inside
            for one in level
            if isinstance(one, dict | list)
            for inside in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def shown(value: object) -> str:
    """Return a value for a message, cut off after 60 characters.

    Example:
        >>> shown([1, "a"]), shown(10**9999)
        ("[1, 'a']", 'a number of more than 4300 digits')
    """
    try:
        text = repr(value)
    except ValueError:
        return f"a number of more than {sys.get_int_max_str_digits()} digits"
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


class _BoundedLoader(yaml.SafeLoader):
    """Counts the values as they are composed; an alias counts as many as its anchor has ("billion laughs")."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        place = self.peek_event().start_mark
        before = self._count
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} levels deep", place)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias:
            if id(node) not in self._sizes:
                raise _refused("an alias stands for a value that it is part of", place)
            self._count += self._sizes[id(node)]
        else:
            self._count += 1
            self._sizes[id(node)] = self._count - before
        if self._count > MAX_NODES:
            raise _refused(f"more than {MAX_NODES:,} values, those of aliases included", place)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        found: set[tuple[str, str]] = set()
        for key, _ in node.value:  # PyYAML would take the last value of a key without a word
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in found:
                raise _refused(f"the key {shown(key.value)} is there twice", key.start_mark)
            found.add((key.tag, str(key.value)))
        return node


def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place)
