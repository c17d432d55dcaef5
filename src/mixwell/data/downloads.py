"""Files that are fetched once, verified by checksum, and kept in a cache. Whoever fetches says so."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Where fetched files are kept.

    Returns:
        ``$MIXWELL_CACHE``, or ``mixwell`` in the user's cache folder.
    """
    own = os.environ.get("MIXWELL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixwell"


def has_checksum(content: bytes, sha256: str) -> bool:
    """Whether these are the expected bytes.

    Args:
        content: of a file.
        sha256: its checksum, in hexadecimal digits.

    Returns:
        Whether they agree.

    Example:
        >>> has_checksum(b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
        True
    """
    return hashlib.sha256(content).hexdigest() == sha256
