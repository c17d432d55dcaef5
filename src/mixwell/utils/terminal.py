"""Output of commands: lines that are not wrapped or colored, and tables that fit into a file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

WIDTH = 110


def say(console: Console, text: str) -> None:
    """Print a line as it is, without markup, highlighting or wrapping."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def show(console: Console, table: Table) -> None:
    """Print a table; where there is no terminal, wide enough not to be cut."""
    wide = console if console.is_terminal else Console(width=max(WIDTH, console.width))
    wide.print(table)
