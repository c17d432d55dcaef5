"""How little changes: each example beside its twin without mixing, and the diffs that the guides begin with."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES, GUIDES = ROOT / "examples", ROOT / "docs" / "guides"
TWINS = sorted(path.name for path in (EXAMPLES / "plain").glob("*.py"))
PAGES = {
    "trainer.md": "hf_trainer.py",
    "lightning.md": "lightning_callback.py",
    "accelerate.md": "accelerate_loop.py",
    "datasets.md": "streaming.py",
}
MOST = 5
"""Lines that mixing may add, but for blank ones."""
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def diff(before: str, after: str) -> list[str]:
    """A unified diff with one line around each change, without names of files, numbers of lines, and line ends.

    Numbers would change with every line that both files have.
    """
    found = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm=""))
    return ["@@" if line.startswith("@@") else line.rstrip() for line in found[3:]]


def of_example(name: str) -> list[str]:
    plain, mixed = (path.read_text(encoding="utf-8") for path in (EXAMPLES / "plain" / name, EXAMPLES / name))
    return diff(plain, mixed)


def added(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("+") and line[1:].strip()]


def first_block(text: str) -> tuple[str, list[str]]:
    """The language and the lines of the first fenced block of a page."""
    block = BLOCK.search(text)
    assert block is not None
    return block[1], [line.rstrip() for line in block[2].splitlines()]


@pytest.mark.parametrize("name", TWINS)
def test_mixing_adds_few_lines(name: str) -> None:
    lines = added(of_example(name))
    assert 1 <= len(lines) <= MOST, lines


def test_every_plain_example_has_a_guide() -> None:
    assert sorted(PAGES.values()) == TWINS


@pytest.mark.parametrize("page", PAGES)
def test_guide_starts_with_current_diff(page: str) -> None:
    language, shown = first_block((GUIDES / page).read_text(encoding="utf-8"))
    real = of_example(PAGES[page])
    assert language == "diff"
    assert shown == real, f"docs/guides/{page} must begin with this block:\n" + "\n".join(real)


def test_wrong_diff_is_detected() -> None:
    before, after = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n", "a = 1\nb = 4\n\nc = 3\nd = 4\ne = 5\nf = 6\n"
    real = [" a = 1", "-b = 2", "+b = 4", "+", " c = 3", "@@", " e = 5", "+f = 6"]
    assert diff(before, after) == real
    assert added(real) == ["+b = 4", "+f = 6"]
    page = "# Page\n\n```diff\n" + "\n".join(real) + "\n```\n\n```python\nx = 1\n```\n"
    assert first_block(page) == ("diff", real)
    assert first_block(page.replace("+b = 4", "+b = 5")) != ("diff", real)
