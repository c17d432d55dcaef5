"""Text from this Python installation, as ``mixwell demo`` has it."""

from __future__ import annotations

from pathlib import Path

from mixwell.lab.demo import corpus
from mixwell.lab.problems.packages import Say


def prepare(folder: Path, say: Say) -> None:
    """Write the text, unless it is there.

    Args:
        folder: where to.
        say: told so.
    """
    if not (folder / f"{corpus.TEST}.txt").exists():
        say(f"writing text from this Python installation to {folder}")
        corpus.write(folder)
