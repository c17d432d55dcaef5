"""YAML that is refused, with the place."""

from __future__ import annotations

import pytest

from mixwell.utils.parsing import parse_yaml


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("steps: 400\nsteps: 3\n", "'steps' is there twice at line 2, column 1"),
        ("domains:\n  web: a\n  code: b\n  web: c\n", "'web' is there twice at line 4, column 3"),
        ("batch: {rows: 8, rows: 16}\n", "'rows' is there twice at line 1"),
    ],
)
def test_repeated_key_is_refused(text: str, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_yaml(text)


def test_keys_of_other_mappings_and_merged_ones_may_repeat() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {1: i, '1': s}\n"
    assert parse_yaml(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {1: "i", "1": "s"}}
