"""The demo: four domains and a target from text that every Python installation has; nothing is downloaded.

- *code*: modules of the standard library, their docstrings taken out;
- *manual*: the language manual's prose (:mod:`pydoc_data.topics`);
- *names*: the names of Unicode's characters;
- *noise*: characters of the code in random order, which teach nothing but their frequencies;
- the target: docstrings of the standard library, which are in none of them.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

from mixwell.data.sketches import LINE_CHARACTERS
from mixwell.lab.packages import Say
from mixwell.utils import files

CODE, MANUAL, NAMES, NOISE = DOMAINS = ("code", "manual", "names", "noise")
VALIDATION, TEST = "validation", "test"
# Enough that a short run does not see anything twice, and little enough to be ready in a moment.
MOST_CHARACTERS = 1_500_000


def prepare(folder: Path, say: Say) -> None:
    """Write the texts into ``folder``, unless they exist."""
    if not (folder / f"{TEST}.txt").exists():
        say(f"writing text from this Python installation to {folder}")
        write_texts(folder)


def write_texts(folder: Path) -> None:
    """Write a text file for each domain, the validation set and the test set."""
    docstrings: list[str] = []
    modules: list[str] = []
    for _, text in library_modules():
        found, rest = split_docstrings(text)
        docstrings += [one for one in found if len(one) > 80]
        modules.append(rest)
    random.Random(0).shuffle(docstrings)
    docstrings = list(_without_copies(docstrings))
    half = len(docstrings) // 2
    characters = list("".join(modules)[: MOST_CHARACTERS // 2])
    random.Random(0).shuffle(characters)
    from pydoc_data.topics import topics

    texts = {
        CODE: "\n".join(modules),
        MANUAL: "\n\n".join(topics.values()),
        NAMES: "\n".join(name for _, name in character_names()),
        NOISE: "".join(characters),
        VALIDATION: "\n\n".join(docstrings[:half]),
        TEST: "\n\n".join(docstrings[half:]),
    }
    for name, text in texts.items():
        files.write_atomically(folder / f"{name}.txt", text[:MOST_CHARACTERS])


def split_docstrings(source: str) -> tuple[list[str], str]:
    r"""Return the docstrings of a module, and its code without their lines.

    Example:
        >>> split_docstrings('def f():\n    "What it does."\n    return 1\n')
        (['What it does.'], 'def f():\n    return 1\n')
    """
    found: list[str] = []
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        found.append(text)
        first = node.body[0]
        for line in range(first.lineno - 1, first.end_lineno or first.lineno):
            lines[line] = ""
    return found, "".join(lines)


def _without_copies(texts: list[str]) -> Iterator[str]:
    """Yield the texts that share no line with an earlier one, so that a split of them has no overlap."""
    seen: set[str] = set()
    for text in texts:
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) >= LINE_CHARACTERS}
        if not lines & seen:
            seen |= lines
            yield text


def library_modules() -> Iterator[tuple[str, str]]:
    """Yield name and text of the standard library's modules, shuffled."""
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = ("site-packages", "pydoc_data", "idlelib")
    found = [path.relative_to(library) for path in (*library.glob("*.py"), *library.glob("*/*.py"))]
    paths = sorted((p for p in found if p.parts[0] not in left_out and "test" not in str(p)), key=str)
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            text = (library / path).read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in old modules
                ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            continue
        yield ".".join(path.with_suffix("").parts).removesuffix(".__init__"), text


def character_names() -> Iterator[tuple[str, str]]:
    """Yield the Unicode characters that are named individually, with their names."""
    named = ((chr(point), unicodedata.name(chr(point), "")) for point in range(0x20, 0x20000))
    # Ideographs and syllables are numbered, not named.
    for character, name in named:
        if name and "IDEOGRAPH" not in name and "HANGUL SYLLABLE" not in name:
            yield character, name
