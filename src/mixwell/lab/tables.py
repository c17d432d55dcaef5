"""Tidy tables: one row per observation, plain CSV that any tool reads, written whole."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mixwell.utils import files

Value = str | int | float
Row = dict[str, Value]


def read(path: Path) -> list[Row]:
    """The rows of a table; whole numbers and floats come back as such.

    Args:
        path: a CSV file with a header.

    Returns:
        The rows; none where there is no file.

    Raises:
        ValueError: a row is too short or too long for the header.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(lines[0]):
            raise ValueError(
                f"{path}, line {number} has {len(line)} values for {len(lines[0])} columns; mend or remove it"
            )
        rows.append({name: _value(text) for name, text in zip(lines[0], line, strict=True)})
    return rows


def write(path: Path, rows: Iterable[Mapping[str, Value]]) -> Path:
    """Write a table whole. Floats are written so that they read back to the same bits.

    Args:
        path: where to; its folder is made if it is missing.
        rows: all with the columns of the first.

    Returns:
        The path.

    Raises:
        ValueError: a row has other columns, or there is none.
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
    """The numbers of a column.

    Args:
        rows: of a table.
        name: of the column.

    Returns:
        One number for each row.
    """
    return [float(row[name]) for row in rows]


def _value(text: str) -> Value:
    if "_" in text:  # which Python would read as a number with groups of digits
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
