"""A case of the fuzzer: files that it writes, the command line that reads them, and the ways it may end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import yaml

from helpers.text_configs import write_config

Outcome = Literal["message", "accepted", "user traceback", "traceback", "hang", "silent", "abort"]
GOOD: tuple[Outcome, ...] = ("message", "accepted", "user traceback")
BAD: tuple[Outcome, ...] = ("traceback", "hang", "silent", "abort")
HUGE = 10**30
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 2**31, 2**63, HUGE, 0.5, -0.5, 1e300, 1e-320, float("nan"), float("inf"), "", "x",
    "\0", "1e3", "~nobody/x", [], [1], [[]], {}, {"x": 1}, {1: 2}, [None], "é" * 300,
)  # fmt: skip
"""Values that replace those of valid files."""


@final
@dataclass(frozen=True)
class Case:
    """One command with its files.

    Args:
        write: writes files into an empty folder and returns the arguments of ``mixwell``, run in that folder.
        stdin: its standard input.
        raises_own: a function of the user raises, so that its traceback is right.
    """

    kind: str
    name: str
    write: Callable[[Path], Sequence[str | Path]]
    stdin: str = ""
    raises_own: bool = False


@final
@dataclass(frozen=True)
class Result:
    """How a case ended, and what it printed."""

    case: Case
    outcome: Outcome
    status: int
    output: str

    def __str__(self) -> str:
        return (
            f"{self.outcome}: {self.case.kind}: {self.case.name} (status {self.status})\n{self.output[-600:]}"
        )


def table(results: Iterable[Result]) -> str:
    """Return the counts by kind and outcome as text."""
    counts = Counter((one.case.kind, one.outcome) for one in results)
    kinds = sorted({kind for kind, _ in counts})
    rows = [[kind, *(str(counts[kind, outcome]) for outcome in (*GOOD, *BAD))] for kind in kinds]
    totals = [sum(counts[kind, outcome] for kind in kinds) for outcome in (*GOOD, *BAD)]
    rows = [["kind", *GOOD, *BAD, "all"], *([*row, str(sum(map(int, row[1:])))] for row in rows)]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


SMALL: dict[str, Any] = {
    "steps": 4,
    "test": None,
    "model": {"layers": 1, "heads": 2, "width": 8, "context": 8},
    "batch": {"rows": 6},
    "mixer": {"horizon": 2},
    "output": {"log_every": 1, "evaluate_every": 4, "evaluate_rows": 4, "checkpoint_every": 2},
}
"""Settings of a run of a fraction of a second."""


def small_config(folder: Path, **changes: Any) -> Path:
    """Write the texts and the config of a small run."""
    return write_config(folder, **(SMALL | changes))


def plain_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write texts, and return the values of the config of a small run."""
    return yaml.safe_load(small_config(folder, **changes).read_text())


def paths_in(plain: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside plain values, at most two items of each list."""
    inside = (
        list(plain.items())
        if isinstance(plain, dict)
        else list(enumerate(plain))[:2]
        if isinstance(plain, list)
        else []
    )
    return [found for key, value in inside for found in ((*before, key), *paths_in(value, (*before, key)))]


def replace_at(plain: Any, path: Sequence[Any], value: Any) -> None:
    """Replace a value inside plain values."""
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = value


def delete_at(plain: Any, path: Sequence[Any]) -> None:
    """Delete a value inside plain values."""
    for key in path[:-1]:
        plain = plain[key]
    del plain[path[-1]]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return bytes of which some are flipped, cut off, repeated, removed or replaced."""
    if not content:
        return content
    place = chance.randrange(len(content))
    length = min(chance.choice([1, 1, 4, 40]), len(content) - place)
    match chance.randrange(6):
        case 0:
            return content[:place]
        case 1:
            return (
                content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
            )
        case 2:
            return content[:place] + content[place + length :]
        case 3:
            return (
                content[:place] + content[place : place + length] * chance.choice([2, 50]) + content[place:]
            )
        case 4:
            return content[:place] + chance.randbytes(length) + content[place + length :]
        case _:
            return (
                content[:place]
                + chance.choice([b"\0", b"\xff", b"{", b"[", b":", b"\n", b"-", b"9" * 400])
                + content[place:]
            )
