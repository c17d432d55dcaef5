"""Docstrings as they stand in the sources, made ready for Markdown.

Roles of Sphinx become links where their target is in the reference, and code where it is not. What follows ``::``
is a block of Python, and an indented formula need not be marked as code once more.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Extension, Module, Object

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):`(~?)([\w.]+)`")
_SECTION = re.compile(r"^(?:Args|Returns|Yields|Raises|Examples?|References):$", re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:    .*\n?|\n(?=    ))+")


class Markup(Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """All of the package is known, so that names can be looked up.

        Args:
            pkg: the package.
        """
        _rewrite(pkg, set())


def _rewrite(item: Object, seen: set[str]) -> None:
    seen.add(item.path)
    if item.docstring is not None:
        item.docstring.value = markdown(item.docstring.value, item)
    for member in item.members.values():
        if not member.is_alias and member.path not in seen:
            _rewrite(member, seen)  # pyright: ignore[reportArgumentType]


def markdown(text: str, item: Object | None = None) -> str:
    """A docstring as Markdown.

    Args:
        text: the docstring.
        item: what it describes; names are looked up in it and around it.

    Returns:
        The text without roles of Sphinx, and with fences around code.
    """
    section = _SECTION.search(text)
    end = section.start() if section else len(text)
    prose, sections = text[:end], text[end:]
    prose = _INDENTED.sub(lambda block: _fenced(prose[: block.start()], block[0]), prose)
    prose = re.sub(r"::\n", ":\n", prose)
    # griffe knows the section by this name only.
    sections = re.sub(r"^Example:$", "Examples:", sections, flags=re.MULTILINE)
    return _ROLE.sub(lambda role: _link(role[2], item, short=role[1] == "~"), prose + sections)


def _fenced(before: str, block: str) -> str:
    line = before.rstrip("\n").rsplit("\n", 1)[-1]
    language = "python" if line.endswith("::") else "text"
    inside = dedent(block).strip("\n")
    if language == "text":
        inside = re.sub(r"``([^`]*)``", r"\1", inside)
    return f"```{language}\n{inside}\n```\n" + ("\n" if block.endswith("\n\n") else "")


def _link(name: str, item: Object | None, *, short: bool) -> str:
    """A link by the full name, which becomes plain text where the reference does not have it."""
    shown = name.removeprefix("mixwell.") if name.count(".") == 1 else name
    shown = name.rsplit(".", 1)[-1] if short else shown
    first = name.split(".")[0]
    around = item
    while around is not None and first not in around.members:
        around = around.parent
    full = name if around is None or first == "mixwell" else f"{around.path}.{name}"
    return f'<autoref optional identifier="{full}"><code>{shown}</code></autoref>'
