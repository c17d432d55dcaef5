"""Hugging Face ``datasets``: the probabilities of ``interleave_datasets``.

::

    mix = json.load(open("mix.json"))
    rows = [tokenized[name] for name in mix["domains"]]
    interleave_datasets(rows, probabilities=mix["probabilities"], seed=0)

It draws examples, and mixwell's weights are fractions of rows of equal length: cut the text into such rows first,
or a domain of long documents has more of the tokens than its weight says. NumPy's ``Generator.choice``, by which
it draws, refuses probabilities that do not sum to one within 1.5e-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format
from mixwell.integrations.exporters.plain import json_text


def _write(entries: Sequence[Entry]) -> str:
    mix: dict[str, list[Any]] = {
        "domains": [entry.domain for entry in entries],
        "probabilities": [entry.share for entry in entries],
    }
    if any(entry.path is not None for entry in entries):
        mix["paths"] = [entry.name for entry in entries]
    return json_text(mix)


EXPORTERS.register(
    "datasets",
    Format(
        "Hugging Face: JSON with domains and the probabilities of interleave_datasets",
        _write,
        needs_paths=False,
    ),
)
