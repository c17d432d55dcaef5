"""The cache of downloaded files, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mixwell.utils.regular_files import expand_user


def cache_folder() -> Path:
    """Return ``$MIXWELL_CACHE``, or ``mixwell`` in the user's cache folder."""
    own = os.environ.get("MIXWELL_CACHE")
    if own:
        return expand_user(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixwell"


def has_checksum(content: bytes, sha256: str) -> bool:
    """Return whether content has a SHA-256 checksum, in hexadecimal digits.

    Example:
        >>> has_checksum(b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
        True
    """
    return hashlib.sha256(content).hexdigest() == sha256
