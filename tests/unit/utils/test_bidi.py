"""Names with bidirectional control characters, compared with the levels of UAX 9 counted by hand."""

from __future__ import annotations

import pytest

from mixwell.utils.bidi import isolate, without_controls

OPEN, CLOSE = "\u2066\u2067\u2068", "\u2069"


@pytest.mark.parametrize(
    "name",
    [
        "\u202egpj",
        "a\u2069\u202eb",
        "\u2067\u2067x",
        "\u2069",
        "שלום",
        "\u2068a\u2069\u2069",
        "x\u2029\u202ey",
    ],
)
def test_isolates_are_balanced_and_end_with_the_name(name: str) -> None:
    made = isolate(name)
    depth = 0
    for place, character in enumerate(made):
        depth += (character in OPEN) - (character == CLOSE)
        assert depth > 0 or place == len(made) - 1  # nothing of the name is outside
    assert depth == 0
    assert "\u2029" not in made


def test_other_names_are_unchanged() -> None:
    assert isolate("Übersetzungen-zh-Hans") == "Übersetzungen-zh-Hans"
    assert without_controls("a\u202eb") == "ab"
