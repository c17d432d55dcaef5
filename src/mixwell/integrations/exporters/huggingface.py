"""Hugging Face ``datasets``: the probabilities of ``interleave_datasets``.

::

    mix = json.load(open("mix.json"))
    rows = [tokenized[name] for name in mix["domains"]]
    interleave_datasets(rows, probabilities=mix["probabilities"], seed=0)

It draws examples, and mixwell's weights are shares of rows of equal length: cut the text into such rows first, or
a domain of long documents has more of the tokens than its weight says. It draws with NumPy's ``Generator.choice``,
which refuses probabilities that do not sum to one within 1.5e-8.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mixwell.integrations.exporters.base import Entry, Format


def write(entries: Sequence[Entry]) -> str:
    """``domains`` and ``probabilities`` in the same order; ``paths`` too, where some were given.

    Args:
        entries: the domains.

    Returns:
        JSON.
    """
    mix: dict[str, list[Any]] = {
        "domains": [entry.domain for entry in entries],
        "probabilities": [entry.share for entry in entries],
    }
    if any(entry.path is not None for entry in entries):
        mix["paths"] = [entry.name for entry in entries]
    return json.dumps(mix, indent=1, ensure_ascii=False) + "\n"


FORMAT = Format(
    "datasets",
    "Hugging Face: JSON with domains and the probabilities of interleave_datasets",
    write,
    needs_paths=False,
)
