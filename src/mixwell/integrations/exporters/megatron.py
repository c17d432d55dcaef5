"""Megatron-LM: a blend of indexed datasets.

Megatron reads ``--data-args-path`` as words between white space, a weight and a prefix in turn
(``get_blend_from_list`` of Megatron-Core), and cuts every prefix into training, validation and test by
``--split``. ``--per-split-data-args-path`` is a JSON file with such a list, or ``null``, for each of ``train``,
``valid`` and ``test``. A weight is a fraction of samples of equal length, as in mixwell, and must be positive.
"""

from __future__ import annotations

from collections.abc import Sequence

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format
from mixwell.integrations.exporters.plain import json_text


def _blend(entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.name.split() != [entry.name]:
            raise ValueError(
                f"Megatron reads this file as words, so {entry.name!r} cannot have white space; give another "
                "--path, or take --to megatron-per-split"
            )
    return "".join(f"{entry.text} {entry.name}\n" for entry in entries)


def _per_split(entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.name.strip() != entry.name:
            raise ValueError(
                f"Megatron takes white space off both ends of {entry.name!r}; give another --path for it"
            )
    train = [word for entry in entries for word in (entry.text, entry.name)]
    return json_text({"train": train, "valid": None, "test": None})


EXPORTERS.register("megatron", Format("Megatron-LM: a blend for --data-args-path", _blend))
EXPORTERS.register(
    "megatron-per-split",
    Format("Megatron-LM: JSON for --per-split-data-args-path; put your validation set into it", _per_split),
)
