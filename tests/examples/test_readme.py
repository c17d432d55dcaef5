"""The files that the README names exist; `test_docs.py` runs its blocks."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_named_files_exist() -> None:
    named = r"(?:`|\()((?:examples|bench|docs|tests|results)/[\w./-]+?)(?:#[\w-]+)?(?:`|\))"
    for name in re.findall(named, README.read_text()):
        assert (README.parent / name).exists(), name
