"""A learned mixture for other tools, as static weights: one short module for each of them."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from mixwell.integrations.exporters import axolotl, huggingface, llama_factory, megatron, plain, torchtitan
from mixwell.integrations.exporters.base import Entry, Format, unknown
from mixwell.integrations.exporters.rounding import shares
from mixwell.training import mixture as mixtures

__all__ = ["FORMATS", "Entry", "Exported", "Format", "export", "prepare"]

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        huggingface.FORMAT,
        megatron.FORMAT,
        megatron.PER_SPLIT,
        torchtitan.FORMAT,
        axolotl.FORMAT,
        llama_factory.FORMAT,
        plain.JSON,
        plain.CSV,
        plain.YAML,
    )
}
CHOICES = ("average", "last")
UNWRITABLE = {
    "Cc": "a control character",
    "Cs": "half a character",
    "Zl": "a line break",
    "Zp": "a line break",
}


@final
@dataclass(frozen=True)
class Exported:
    """A mixture in a format.

    Args:
        text: of the file.
        notes: what the user should know of it, a line each.
    """

    text: str
    notes: tuple[str, ...]


def export(
    mixture: Path | str | Mapping[str, Any],
    *,
    to: str,
    weights: str = "average",
    paths: Mapping[str, str] | None = None,
) -> str:
    """A mixture as another tool takes it. What the user should know beside is given as warnings.

    Args:
        mixture: a ``mixture.json``, the directory of a run that has one, or its content.
        to: one of :data:`FORMATS`.
        weights: ``"average"``, the mixture to take for another run, or ``"last"``.
        paths: the tool's own names of domains: paths, prefixes, names of datasets.

    Returns:
        The text of the file.

    Example:
        >>> learned = {"web": 0.25, "code": 0.75}
        >>> mixture = {
        ...     "format": 1, "domains": ["web", "code"], "weights": {"last": learned, "average": learned},
        ...     "history": [], "method": "hypergradient", "horizon": 84, "budget": 1000, "steps_done": 1000,
        ...     "finished": True, "seed": 0, "rows": {"available": {"web": 9, "code": 9}}, "made_with": {},
        ... }
        >>> print(export(mixture, to="megatron", paths={"web": "/data/web", "code": "/data/code"}), end="")
        0.25 /data/web
        0.75 /data/code
    """
    exported = prepare(mixture, to=to, weights=weights, paths=paths)
    for note in exported.notes:
        warnings.warn(note, stacklevel=2)
    return exported.text


def prepare(
    mixture: Path | str | Mapping[str, Any],
    *,
    to: str,
    weights: str = "average",
    paths: Mapping[str, str] | None = None,
) -> Exported:
    """As :func:`export`, with the notes for the caller to show.

    Args:
        mixture: a ``mixture.json``, the directory of a run that has one, or its content.
        to: one of :data:`FORMATS`.
        weights: ``"average"``, the mixture to take for another run, or ``"last"``.
        paths: the tool's own names of domains: paths, prefixes, names of datasets.

    Returns:
        The text of the file, and the notes.

    Raises:
        ValueError: the format or a domain is unknown, the file is not a mixture, or the format cannot hold a name.
    """
    chosen = find(to)
    if weights not in CHOICES:
        raise ValueError(f"weights must be {' or '.join(CHOICES)}, got {weights!r}")
    plain_values = mixtures.check(mixture) if isinstance(mixture, Mapping) else mixtures.read(Path(mixture))
    entries = _entries(plain_values, weights, paths or {})
    notes = [chosen.note] if chosen.note else []
    if not plain_values["finished"]:
        of = (
            f" of {plain_values['budget']}" if plain_values["budget"] else ""
        )  # a loop need not have a budget
        done = f"{plain_values['steps_done']}{of} steps"
        notes.append(f"the run is not finished ({done}): these are its weights so far")
    if not chosen.keeps_zeros:
        empty = [entry.domain for entry in entries if not entry.share]
        entries = [entry for entry in entries if entry.share]
        if empty:
            notes.append(f"left out, for their weight rounds to zero: {', '.join(empty)}")
    unnamed = [entry.domain for entry in entries if entry.path is None]
    if unnamed and (chosen.needs_paths or len(unnamed) < len(entries)):
        notes.append(f"no path was given for {', '.join(unnamed)}; the domain's name stands in its place")
    return Exported(chosen.write(entries), tuple(notes))


def find(name: str) -> Format:
    """A format by its name.

    Args:
        name: of the format.

    Returns:
        The format.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(unknown("format", name, FORMATS))
    return FORMATS[name]


def _entries(mixture: Mapping[str, Any], weights: str, paths: Mapping[str, str]) -> list[Entry]:
    domains = cast("Sequence[str]", mixture["domains"])
    for name in paths:
        if name not in domains:
            raise ValueError(unknown("domain", name, domains))
    rounded = shares([mixture["weights"][weights][name] for name in domains])
    rows = mixture["rows"]["available"]
    entries = [
        Entry(name, paths.get(name), share, rows.get(name))
        for name, share in zip(domains, rounded, strict=True)
    ]
    seen: dict[str, str] = {}
    for entry in entries:
        _check_writable(entry.domain)
        _check_writable(entry.name)
        if entry.name in seen:
            raise ValueError(f"{seen[entry.name]!r} and {entry.domain!r} have the same path, {entry.name!r}")
        seen[entry.name] = entry.domain
    return entries


def _check_writable(name: str) -> None:
    if not name:
        raise ValueError("the path of a domain must not be empty")
    for character in name:
        kind = unicodedata.category(character)
        if kind in UNWRITABLE:
            raise ValueError(f"{name!r} has {UNWRITABLE[kind]}, which no format can hold; give another name")
