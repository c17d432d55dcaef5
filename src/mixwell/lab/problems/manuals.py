"""Manual pages in six languages, from Debian's translations. Italian is wanted, and there is little of it."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path, PurePosixPath

from mixwell.data.sketches import LINE_CHARACTERS
from mixwell.lab import packages
from mixwell.lab.packages import Package, Say
from mixwell.lab.problems.text import deal, write_texts

LANGUAGES = {"german": "de", "french": "fr", "spanish": "es", "polish": "pl", "dutch": "nl", "italian": "it"}
"""Debian's letters by domain; the wanted one is the last."""
WANTED = "italian"
TRAIN_CHARACTERS = 60_000
"""Of the wanted language to train on."""
HELD_OUT_CHARACTERS = 140_000
"""Of the wanted language for validation, and the same number for the test."""
MOST_CHARACTERS = 2_000_000
"""Of the other languages."""
_TRANSLATORS = ("ÜBERSETZUNG", "TRADUCTION", "TRADUCCIÓN", "TŁUMACZENIE", "VERTALING", "TRADUZIONE")
"""Headings of the last section of most pages, which says who translated it and under which license."""
# Macros with text as arguments; the lines of all others are left out.
_ALTERNATING = {"BR", "IR", "BI", "IB", "RB", "RI"}
_WITH_TEXT = _ALTERNATING | {"SH", "SS", "B", "I", "R", "SM", "SB", "IP", "Sh", "Nd", "It"}
_SKIPPED = {"TS": "TE", "de": ".", "ig": ".", "EQ": "EN"}
"""Macros that begin a table, a definition and the like, and what ends it."""
_CHARACTERS = {
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "Fo": "«", "Fc": "»",
    "em": "—", "en": "–", "bu": "•", "co": "©", "ha": "^", "ti": "~", "rs": "\\", "ga": "`",
}  # fmt: skip
_ESCAPES = re.compile(
    r"\\(?:f(?:\(..|\[[^]]*\]|.)|s[-+]?\d|\*(?:\(..|\[[^]]*\]|.)|\((?P<two>..)|\[(?P<long>[^]]*)\]|(?P<one>.))"
)
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def prepare(folder: Path, say: Say) -> None:
    """Write a file for each language, validation and test, unless they exist."""
    if (folder / "test.txt").exists():  # written last
        return
    texts: dict[str, str] = {}
    others: set[str] = set()
    for name, letters in LANGUAGES.items():
        found = pages(packages.fetch(Package("Debian", f"manpages-{letters}"), say=say), letters)
        if name == WANTED:
            parts = split_pages(found, train=TRAIN_CHARACTERS, held_out=HELD_OUT_CHARACTERS, left_out=others)
            texts |= {part: "\n\n".join(own.values()) for part, own in parts.items()}
        else:
            others |= set().union(*map(_long_lines, found.values()))
            texts[name] = "\n\n".join(found[page] for page in _shuffled(found))[:MOST_CHARACTERS]
    texts[WANTED] = texts.pop("train")
    write_texts(folder, {name: texts[name] for name in (*LANGUAGES, "validation", "test")}, say)


def pages(archive: Path, language: str) -> dict[str, str]:
    """Return the plain text of a Debian package's manual pages by name, such as ``ls.1``, except references."""
    found = packages.members(archive, lambda name: f"/man/{language}/" in name and name.endswith(".gz"))
    texts: dict[str, str] = {}
    for name, content in found.items():
        text = plain(gzip.decompress(content).decode("utf-8", "replace"))
        for heading in _TRANSLATORS:
            text = text.partition(f"\n{heading}\n")[0]
        texts[PurePosixPath(name).name.removesuffix(".gz")] = text
    return {name: text for name, text in sorted(texts.items()) if len(text) > 2 * LINE_CHARACTERS}


def plain(roff: str) -> str:
    r"""Return the text of a manual page without roff's requests, macros, escapes, comments and tables.

    Example:
        >>> plain('.\\" Comment\n.TH LS 1\n.SH NOME\n\\fBls\\fP \\- elenca i file\n.BR chmod (1),\n.sp 2\n')
        'NOME\nls - elenca i file\nchmod(1),'
    """
    lines: list[str] = []
    end: str | None = None
    for line in roff.splitlines():
        control = line[:1] in (".", "'")
        macro = re.split(r"\s", line[1:].lstrip(), maxsplit=1)[0] if control else ""
        if end is not None:
            end = None if macro == end else end
        elif control and macro in _SKIPPED:
            end = _SKIPPED[macro]
        elif control and macro in _WITH_TEXT:
            arguments = [
                quoted or bare for quoted, bare in _ARGUMENT.findall(line[1:].lstrip()[len(macro) :])
            ]
            kept = arguments[:1] if macro == "IP" else arguments
            lines.append(_unescaped(("" if macro in _ALTERNATING else " ").join(kept)))
        elif not control:
            lines.append(_unescaped(line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()


def split_pages(
    found: Mapping[str, str], *, train: int, held_out: int, left_out: AbstractSet[str] = frozenset()
) -> dict[str, dict[str, str]]:
    """Shuffle pages and deal them to ``train``, ``validation`` and ``test``; no long line is in two parts.

    Pages share lines (licenses, or ``dir`` and ``ls``); only the first page that has a line keeps it.

    Args:
        found: text by name of page.
        train: characters to train on.
        held_out: characters for validation, and for the test.
        left_out: lines to leave out, such as untranslated ones that other languages have too.
    """
    seen = set(left_out)
    own: dict[str, str] = {}
    for name in _shuffled(found):
        lines = [line for line in found[name].splitlines() if line.strip() not in seen]
        own[name] = "\n".join(lines)
        seen |= _long_lines(own[name])
    return deal(own, {"train": train, "validation": held_out, "test": held_out})


def _long_lines(text: str) -> set[str]:
    """Return the lines that are too long to be equal by chance."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LINE_CHARACTERS}


def _shuffled(found: Mapping[str, str]) -> list[str]:
    names = sorted(found)
    random.Random(0).shuffle(names)
    return names


def _unescaped(line: str) -> str:
    line = re.sub(r'\\["#].*', "", line)
    return _ESCAPES.sub(_character, line)


def _character(match: re.Match[str]) -> str:
    one, two, long = match["one"], match["two"], match["long"]
    if one is not None:
        return {"-": "-", "e": "\\", "~": " ", " ": " ", "'": "'", "`": "`", ".": ".", "\\": "\\"}.get(
            one, ""
        )
    return _CHARACTERS.get(two or long or "", "")
