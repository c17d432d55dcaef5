"""Converts the docstrings of the package to Markdown.

Sphinx roles become links if their target is in the reference, otherwise code. An indented block after ``::``
becomes a Python block; other indented blocks (formulas) become text blocks, without the double backticks.
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
    """Rewrites the docstrings of a package."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Rewrite all docstrings, after the whole package is loaded, so that names can be resolved."""
        _rewrite(pkg, set())


def _rewrite(item: Object, seen: set[str]) -> None:
    seen.add(item.path)
    if item.docstring is not None:
        item.docstring.value = markdown(item.docstring.value, item)
    for member in item.members.values():
        if not member.is_alias and member.path not in seen:
            _rewrite(member, seen)  # pyright: ignore[reportArgumentType]


def markdown(text: str, item: Object | None = None) -> str:
    """Return a docstring as Markdown, without Sphinx roles and with fenced code blocks.

    Args:
        item: the documented object; names are resolved in it and in its parents.
    """
    section = _SECTION.search(text)
    end = section.start() if section else len(text)
    prose, sections = text[:end], text[end:]
    prose = _INDENTED.sub(lambda block: _fenced(prose[: block.start()], block[0]), prose)
    prose = re.sub(r"::\n", ":\n", prose)
    # griffe only recognizes the plural.
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
    """Return a link by the full name, which becomes plain text if the reference does not contain it."""
    shown = name.removeprefix("mixwell.") if name.count(".") == 1 else name
    shown = name.rsplit(".", 1)[-1] if short else shown
    first = name.split(".")[0]
    around = item
    while around is not None and first not in around.members:
        around = around.parent
    full = name if around is None or first == "mixwell" else f"{around.path}.{name}"
    return f'<autoref optional identifier="{full}"><code>{shown}</code></autoref>'
