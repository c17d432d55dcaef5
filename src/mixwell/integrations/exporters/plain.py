"""``{domain: weight}`` for programs of your own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML, in their order, each on one line."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=float("inf"))


def json_text(values: Any) -> str:
    """Return plain values as JSON that ends with a line break."""
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _by_name(entries: Sequence[Entry]) -> dict[str, float]:
    return {entry.name: entry.share for entry in entries}


def _csv(entries: Sequence[Entry]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([("domain", "weight"), *((entry.name, entry.text) for entry in entries)])
    return text.getvalue()


for _name, _summary, _write in (
    ("json", "{domain: weight}", lambda entries: json_text(_by_name(entries))),
    ("csv", "a row for each domain: domain, weight", _csv),
    ("yaml", "{domain: weight}", lambda entries: yaml_text(_by_name(entries))),
):
    EXPORTERS.register(_name, Format(_summary, _write, needs_paths=False, keeps_zeros=True))
