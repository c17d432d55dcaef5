"""axolotl: ``datasets`` of its config, cut to the sizes that make the mixture.

axolotl (0.19) has no weights: it puts the datasets of ``datasets`` together whole, reads only the first of
``pretraining_dataset``, and is silent about a key that it does not know. (A ``weight`` that cuts a dataset to a
fraction is in no release yet: its pull request 3690.) What it has is ``shards``: a dataset is shuffled and cut
into N, of which ``shards_idx`` names one. So each domain is cut to ``k`` of ``N`` shards,

    ``k / N  ~  (w_i / n_i) / max_j (w_j / n_j)``

with the weights ``w`` and the rows ``n`` that the domains had in the run; the domain that is scarcest for its
weight is taken whole. This is right as far as the datasets are those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format
from mixwell.integrations.exporters.formats import yaml_text

COMMENT = """\
# For axolotl's config. It has no weights: each dataset is cut to the fraction that makes the mixture.
# Change `type` for data that are not plain text.
"""
TOLERANCE = 0.025
"""How far a fraction may be off, relative to it; this needs 20 entries for a domain at most, and mostly few."""


def _write(entries: Sequence[Entry]) -> str:
    needed = [entry.share / _rows(entry) for entry in entries]
    listed: list[dict[str, Any]] = []
    for entry, need in zip(entries, needed, strict=True):
        taken, shards = fraction(need / max(needed))
        whole = {"path": entry.name, "type": "completion"}
        if taken == shards:
            listed.append(whole)
        else:
            listed.extend({**whole, "shards": shards, "shards_idx": index} for index in range(taken))
    return COMMENT + yaml_text({"datasets": listed})


def fraction(value: float) -> tuple[int, int]:
    """Return numerator and denominator of the fraction with the smallest numerator that is near enough.

    Args:
        value: in (0, 1].

    Example:
        >>> fraction(0.37), fraction(0.003), fraction(1.0)
        ((3, 8), (1, 333), (1, 1))
    """
    taken = 1
    # This ends: rounding the denominator is off by a half at most, which is 1 / (2 taken) of the fraction.
    while abs(taken / round(taken / value) / value - 1) > TOLERANCE:
        taken += 1
    return taken, round(taken / value)


def _rows(entry: Entry) -> int:
    if not entry.rows:
        known = "no rows" if entry.rows == 0 else "rows that nobody has counted"
        raise ValueError(
            f"axolotl mixes by size, and the mixture says that {entry.domain!r} has {known}; take --to datasets, "
            "and give axolotl what interleave_datasets makes of it"
        )
    return entry.rows


EXPORTERS.add(
    "axolotl",
    Format(
        "axolotl: datasets of its config, cut by sharding to the mixture (it has no weights)",
        _write,
        path_from_data=lambda path: path,
        note="axolotl mixes by size: these fractions are right for the data that the run had",
    ),
)
