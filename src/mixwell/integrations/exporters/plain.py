"""``{domain: weight}`` for tools of one's own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mixwell.integrations.exporters.base import Entry, Format


def to_json(entries: Sequence[Entry]) -> str:
    """One object.

    Args:
        entries: the domains.

    Returns:
        The file's text.
    """
    return json.dumps(_by_name(entries), indent=1, ensure_ascii=False) + "\n"


def to_csv(entries: Sequence[Entry]) -> str:
    """A row for each domain, below a header.

    Args:
        entries: the domains.

    Returns:
        The file's text.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["domain", "weight"])
    writer.writerows([entry.name, entry.text] for entry in entries)
    return text.getvalue()


def to_yaml(entries: Sequence[Entry]) -> str:
    """One mapping.

    Args:
        entries: the domains.

    Returns:
        The file's text.
    """
    return yaml_text(_by_name(entries))


def yaml_text(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order, each in one line.

    Args:
        values: plain values.

    Returns:
        The text.
    """
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=float("inf"))


def _by_name(entries: Sequence[Entry]) -> dict[str, float]:
    return {entry.name: entry.share for entry in entries}


JSON = Format("json", "{domain: weight}", to_json, needs_paths=False, keeps_zeros=True)
CSV = Format("csv", "a row for each domain: domain, weight", to_csv, needs_paths=False, keeps_zeros=True)
YAML = Format("yaml", "{domain: weight}", to_yaml, needs_paths=False, keeps_zeros=True)
