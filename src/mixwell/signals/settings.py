"""Checks of settings that several signals share."""

from __future__ import annotations

import math


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
