"""What an exporter is given, and what it is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from mixwell.integrations.exporters.rounding import DIGITS


@final
@dataclass(frozen=True)
class Entry:
    """One domain of a mixture, as a consumer is told of it.

    Args:
        domain: its name in the mixture.
        path: the consumer's name for it, where one was given: a path, a prefix, the name of a dataset.
        share: its weight, rounded; those of all entries sum to one.
        rows: that the domain had in the run, where that is known; a stream does not say.
    """

    domain: str
    path: str | None
    share: float
    rows: int | None

    @property
    def name(self) -> str:
        """What the consumer shall call it: its path, or in place of one the domain's name."""
        return self.domain if self.path is None else self.path

    @property
    def text(self) -> str:
        """The share in decimals, never as 1e-06."""
        return f"{self.share:.{DIGITS}f}".rstrip("0").rstrip(".")


@final
@dataclass(frozen=True)
class Format:
    """A kind of file that some tool reads.

    Args:
        name: as ``--to`` takes it.
        summary: one line that says for whom it is, and how they take it.
        write: makes the file's text.
        needs_paths: whether the domains' own names are only placeholders.
        keeps_zeros: whether a domain without weight is written. Most consumers would have to open its data, and
            some refuse it or wait for it for ever.
        note: what everyone who takes it must know.
    """

    name: str
    summary: str
    write: Callable[[Sequence[Entry]], str]
    needs_paths: bool = True
    keeps_zeros: bool = False
    note: str = ""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """What to say of a name that does not exist.

    Args:
        kind: of thing.
        name: that was given.
        known: the names that there are.

    Returns:
        A phrase with the nearest one and all of them.
    """
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"unknown {kind} {name!r}; {guess}the {kind}s are {', '.join(names)}"
