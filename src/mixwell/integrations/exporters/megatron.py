"""Megatron-LM: a blend of indexed datasets.

Megatron reads ``--data-args-path`` as words between white space, a weight and a prefix in turn
(``get_blend_from_list`` of Megatron-Core), and cuts every prefix into training, validation and test by
``--split``. ``--per-split-data-args-path`` is a JSON file with such a list, or ``null``, for each of ``train``,
``valid`` and ``test``. A weight is a share of samples of equal length, as in mixwell, and must be positive.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mixwell.integrations.exporters.base import Entry, Format


def write(entries: Sequence[Entry]) -> str:
    """A weight and a prefix in each line.

    Args:
        entries: the domains.

    Returns:
        The text of a ``--data-args-path`` file.

    Raises:
        ValueError: a prefix has white space, at which Megatron would cut it.
    """
    for entry in entries:
        if entry.name.split() != [entry.name]:
            raise ValueError(
                f"Megatron reads this file as words, so {entry.name!r} cannot have white space; give another "
                "--path, or take --to megatron-per-split"
            )
    return "".join(f"{entry.text} {entry.name}\n" for entry in entries)


def write_per_split(entries: Sequence[Entry]) -> str:
    """The blend as that of training; validation and test are for the user to fill in.

    Args:
        entries: the domains.

    Returns:
        The text of a ``--per-split-data-args-path`` file.

    Raises:
        ValueError: a prefix begins or ends with white space, which Megatron would take away.
    """
    for entry in entries:
        if entry.name.strip() != entry.name:
            raise ValueError(
                f"Megatron takes white space off both ends of {entry.name!r}; give another --path for it"
            )
    train = [word for entry in entries for word in (entry.text, entry.name)]
    return json.dumps({"train": train, "valid": None, "test": None}, indent=1, ensure_ascii=False) + "\n"


FORMAT = Format("megatron", "Megatron-LM: a blend for --data-args-path", write)
PER_SPLIT = Format(
    "megatron-per-split",
    "Megatron-LM: JSON for --per-split-data-args-path; put your validation set into it",
    write_per_split,
)
