"""Names with bidirectional control characters, which must not reorder the text around them."""

from __future__ import annotations

import re
import unicodedata

_OPEN, _CLOSE = "\u2066\u2067\u2068", "\u2069"
_CONTROLS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_RIGHT_TO_LEFT = ("R", "AL", "RLE", "RLO", "RLI")


def isolate(name: str) -> str:
    r"""Return a name for use in a sentence: isolated (U+2068 ... U+2069) if it could reorder other text.

    The closing character ends every embedding and override that the name left open (Unicode Standard Annex 9,
    rule X6a); isolates that the name opened are closed first, and closing characters without an opening one,
    which would end the isolation, are left out. Names in one direction are returned as they are.

    Example:
        >>> isolate("web"), isolate("\u202egpj.exe") == "\u2068\u202egpj.exe\u2069"
        ('web', True)
    """
    name = name.replace("\u2028", " ").replace("\u2029", " ")
    if not _CONTROLS.search(name) and not any(unicodedata.bidirectional(c) in _RIGHT_TO_LEFT for c in name):
        return name
    kept: list[str] = []
    depth = 0
    for character in name:
        depth += character in _OPEN
        if character == _CLOSE:
            if not depth:
                continue
            depth -= 1
        kept.append(character)
    return "\u2068" + "".join(kept) + _CLOSE * (depth + 1)


def without_controls(name: str) -> str:
    """Return a name without bidirectional control characters, for figures, which draw characters one by one."""
    return _CONTROLS.sub("", name)
