"""What a signal computes with fresh batches, where single batches may have values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final

import numpy as np

from mixwell.signals.probes import Probes
from mixwell.typing import Vector

DRAWS = 3
"""The number of batches of one source that are tried before it is left out."""
VALIDATION = "validation"
"""The name under which records have the validation loss and skipped validation batches and gradients."""

T = TypeVar("T")


class Reject(Protocol):
    """The policy of the mixer for contributions that are not finite."""

    def __call__(self, name: str, problem: str, remedy: str) -> None:
        """Raise a ``FloatingPointError`` or count, by the policy."""
        ...


def raise_error(name: str, problem: str, remedy: str) -> None:
    """Raise a ``FloatingPointError``, as a signal does that is in use without a mixer."""
    raise FloatingPointError(f"{problem}; it was not used. {remedy}")


@final
class FiniteDraws:
    """Draws batches of the probes, and draws again where what is computed with one is not finite.

    Args:
        reject: is called for every batch that is left out, with the name of its domain or ``"validation"``.
    """

    def __init__(self, probes: Probes, reject: Reject) -> None:
        self._probes, self._reject = probes, reject

    def batch(self, name: str) -> Any:
        """Return the next batch of a domain, or of the validation set."""
        return self._probes.validation_batch() if name == VALIDATION else self._probes.batch(name)

    def compute(
        self, name: str, compute: Callable[[Any], T], finite: Callable[[T], bool], *, first: Any = None
    ) -> T | None:
        """Return what is computed with a batch and is finite, ``None`` if it is with none of :data:`DRAWS`.

        Args:
            name: the domain, or ``"validation"``.
            first: the first batch to try, if it was drawn before.
        """
        for draw in range(DRAWS):
            found = compute(self.batch(name) if draw or first is None else first)
            if finite(found):
                return found
            self._reject(
                name,
                f"a loss or gradient of {name!r}, computed outside of the training step, is not finite",
                "Look at the rows of that set, or lower the learning rate",
            )
        return None


def fill_missing(values: list[float | None]) -> Vector | None:
    """Return numbers with the mean of the others where one is missing; ``None`` if all are, shape ``(m,)``."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = float(np.mean(known))
    return np.array([mean if value is None else value for value in values], dtype=np.float64)
