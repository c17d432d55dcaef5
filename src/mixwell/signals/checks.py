"""Checks of settings that several signals share."""

from __future__ import annotations

import math
from typing import get_args


def require_positive(**values: float | None) -> None:
    """Raise ``ValueError`` for a value that is not positive and finite; ``None`` is allowed."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")


def require_not_negative(**values: float) -> None:
    """Raise ``ValueError`` for a value that is negative or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative, got {value}")


def require_at_least(least: float, **values: float) -> None:
    """Raise ``ValueError`` for a value below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def require_choice(choices: object, **values: str) -> None:
    """Raise ``ValueError`` for a value that is not one of the choices of a ``Literal``."""
    *others, last = (repr(one) for one in get_args(choices))
    for name, value in values.items():
        if value not in get_args(choices):
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
