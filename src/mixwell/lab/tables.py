"""Tables: tidy CSV files with one row per observation, and tables of texts on the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixwell.utils import files, terminal

Value = str | int | float
Row = dict[str, Value]


def read(path: Path) -> list[Row]:
    """Read a CSV file with a header; numbers come back as such. Return no rows if there is no file.

    Raises:
        ValueError: A row is too short or too long for the header.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(lines[0]):
            raise ValueError(
                f"{path}, line {number} has {len(line)} values for {len(lines[0])} columns; fix or remove it"
            )
        rows.append({name: _value(text) for name, text in zip(lines[0], line, strict=True)})
    return rows


def write(path: Path, rows: Iterable[Mapping[str, Value]]) -> Path:
    """Write a table atomically; floats round-trip exactly.

    Args:
        rows: all with the columns of the first.

    Raises:
        ValueError: A row has other columns, or there is none.
    """
    listed = list(rows)
    if not listed:
        raise ValueError(f"no rows for {path}")
    columns = list(listed[0])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in listed:
        if set(row) != set(columns):
            raise ValueError(f"columns of {path} are {columns}, a row has {list(row)}")
        writer.writerow([row[name] for name in columns])
    files.write_atomically(path, text.getvalue())
    return path


def column(rows: Sequence[Row], name: str) -> list[float]:
    """Return the numbers of a column."""
    return [float(row[name]) for row in rows]


def show(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None
) -> None:
    """Print texts in columns, numbers aligned at the right; nothing is wrapped."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for place, name in enumerate(columns):
        numbers = all(row[place][:1] in "+-0123456789" for row in rows)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    terminal.show(console, table)


def _value(text: str) -> Value:
    if "_" in text:  # Python would read it as a digit separator
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
