"""The examples run, and are short enough to read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
# What Lightning says to everybody.
NOTICES = re.compile(
    r"GPU available|TPU available|💡 Tip|`Trainer.fit` stopped|.*isinstance\(treespec, LeafSpec\)"
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert [line for line in done.stderr.splitlines() if not NOTICES.match(line)] == []
