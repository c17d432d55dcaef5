"""The registry of export formats, and their input: one entry for each domain."""

from __future__ import annotations

import difflib
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from mixwell.integrations.exporters.config_paths import data_paths
from mixwell.training import mixture_file
from mixwell.utils.registry import Registry

DIGITS = 6
"""Decimals of a weight. A learned weight is not known better than this, and people read these files."""
CHOICES = ("average", "last")
UNWRITABLE = {
    "Cc": "a control character",
    "Cs": "half a character",
    "Zl": "a line break",
    "Zp": "a line break",
}


@final
@dataclass(frozen=True)
class Entry:
    """One domain of a mixture.

    Args:
        domain: its name in the mixture.
        path: the consumer's name for it, where one was given: a path, a prefix, the name of a dataset.
        share: its weight, rounded; those of all entries sum to one.
        rows: of the domain in the run; ``None`` where their number is not known, as for a stream.
    """

    domain: str
    path: str | None
    share: float
    rows: int | None

    @property
    def name(self) -> str:
        """The consumer's name for it, or the domain's name in its place."""
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
        summary: one line that names the tool, and the option that takes the file.
        needs_paths: whether the domains' own names are only placeholders.
        keeps_zeros: whether a domain without weight is written. Most consumers would have to open its data, and
            some refuse it or wait for it forever.
        note: a caveat for everyone who uses it.
        path_from_data: returns the tool's name for the data of a domain, given their path in the run's config, or
            ``None`` where the tool does not read them; without it the tool's names have nothing to do with paths.
    """

    summary: str
    write: Callable[[Sequence[Entry]], str]
    needs_paths: bool = True
    keeps_zeros: bool = False
    note: str = ""
    path_from_data: Callable[[str], str | None] | None = None


EXPORTERS = Registry[Format]("format", package="mixwell.integrations.exporters")
"""Formats by the name that ``--to`` takes."""


def export(
    mixture: Path | str | Mapping[str, Any],
    *,
    to: str,
    weights: str = "average",
    paths: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=3),
) -> str:
    """Return a mixture as the text of another tool's file.

    Args:
        mixture: a ``mixture.json``, the directory of a run that has one, or its content.
        to: a name in :data:`EXPORTERS`.
        weights: ``"average"``, the mixture to take for another run, or ``"last"``.
        paths: the tool's own names of domains: paths, prefixes, names of datasets. By default the paths of the
            data in the run's ``config.yaml``, where the tool reads such data.
        note: called with each caveat; by default they are warnings.

    Example:
        >>> learned = {"web": 0.25, "code": 0.75}
        >>> mixture = {
        ...     "format": 1, "domains": ["web", "code"], "weights": {"last": learned, "average": learned},
        ...     "history": [{"step": 0, "weights": learned}], "method": "mixwell", "horizon": 84, "budget": 1000,
        ...     "steps_done": 1000, "finished": True, "seed": 0, "made_with": {},
        ...     "rows": {"available": {"web": 9, "code": 9}, "trained_on": {"web": 4, "code": 8}},
        ... }
        >>> print(export(mixture, to="megatron", paths={"web": "/data/web", "code": "/data/code"}), end="")
        0.25 /data/web
        0.75 /data/code
    """
    chosen = EXPORTERS.get(to)
    if weights not in CHOICES:
        raise ValueError(f"weights must be {' or '.join(CHOICES)}, got {weights!r}")
    plain = (
        mixture_file.check_mixture(mixture)
        if isinstance(mixture, Mapping)
        else mixture_file.read_mixture(Path(mixture))
    )
    given = dict(paths or {})
    if chosen.path_from_data is not None and not isinstance(mixture, Mapping):
        for name, path in data_paths(Path(mixture)).items():
            tool_path = chosen.path_from_data(path) if name in plain["domains"] else None
            if tool_path is not None:
                given.setdefault(name, tool_path)
    entries = _entries(plain, weights, given)
    kept = [entry for entry in entries if entry.share or chosen.keeps_zeros]
    text = chosen.write(kept)
    if chosen.note:
        note(chosen.note)
    if not plain["finished"]:
        of = f" of {plain['budget']}" if plain["budget"] else ""  # a loop need not have a budget
        done = f"{plain['steps_done']}{of} steps"
        note(f"the run is not finished ({done}): these are its weights so far")
    if len(kept) < len(entries):
        dropped = ", ".join(entry.domain for entry in entries if entry not in kept)
        note(f"left out, for their weight rounds to zero: {dropped}")
    unnamed = [entry.domain for entry in kept if entry.path is None]
    if unnamed and (chosen.needs_paths or len(unnamed) < len(kept)):
        note(f"no path was given or found for {', '.join(unnamed)}; the domain's name is used in its place")
    return text


def shares(weights: Sequence[float]) -> list[float]:
    """Round weights to :data:`DIGITS` decimals by largest remainders, so that the decimals sum to exactly one.

    ``floor(w_i 10^d)`` units for each, and one more for those with the largest remainders until there are
    ``10^d``. None is off by a whole unit. The weights need not sum to one.

    Example:
        >>> shares([1, 1, 1])
        [0.333334, 0.333333, 0.333333]
    """
    units, total = 10**DIGITS, math.fsum(weights)
    exact = [weight / total * units for weight in weights]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in by_remainder[: units - sum(whole)]:
        whole[index] += 1
    return [number / units for number in whole]


def unknown_domain(name: str, known: Iterable[str]) -> str:
    """Return the message for a domain that does not exist, with the nearest one and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"unknown domain {name!r}; {guess}the domains are {', '.join(names)}"


def _entries(mixture: Mapping[str, Any], weights: str, paths: Mapping[str, str]) -> list[Entry]:
    domains = cast("Sequence[str]", mixture["domains"])
    for name in paths:
        if name not in domains:
            raise ValueError(unknown_domain(name, domains))
    rounded = shares([mixture["weights"][weights][name] for name in domains])
    rows = mixture["rows"]["available"]
    entries: dict[str, Entry] = {}
    for domain, share in zip(domains, rounded, strict=True):
        entry = Entry(domain, paths.get(domain), share, rows.get(domain))
        _check_writable(domain)
        _check_writable(entry.name)
        if entry.name in entries:
            raise ValueError(
                f"{entries[entry.name].domain!r} and {domain!r} have the same path, {entry.name!r}"
            )
        entries[entry.name] = entry
    return list(entries.values())


def _check_writable(name: str) -> None:
    if not name:
        raise ValueError("the path of a domain must not be empty")
    for character in name:
        kind = unicodedata.category(character)
        if kind in UNWRITABLE:
            raise ValueError(f"{name!r} has {UNWRITABLE[kind]}, which no format can hold; give another name")
