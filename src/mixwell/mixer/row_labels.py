"""The domains of a mixed batch's rows, and the numbers of rows by which their losses are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mixwell.hypergradient.capture.row_groups import Labels
from mixwell.typing import Vector

RowLabels = Tensor | NDArray[Any] | Sequence[Any]
"""For every row the name of its domain, or its number in the order of the domains."""


def domain_numbers(labels: RowLabels, names: Sequence[str]) -> Labels:
    """Return the number of every row's domain, shape ``(rows,)``."""
    numbers = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if numbers.dtype.kind == "U":
        index = {name: number for number, name in enumerate(names)}
        unknown = sorted(set(numbers.tolist()) - set(index))
        if unknown:
            raise ValueError(f"unknown domain {unknown[0]!r}; the domains are {', '.join(names)}")
        numbers = np.array([index[label] for label in numbers.tolist()])
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(
            f"labels must have one entry for every row, and there must be rows; got shape {numbers.shape}"
        )
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(names):
        raise ValueError(
            f"labels must be names of domains, or whole numbers from 0 to {len(names) - 1}; got "
            f"{numbers.min()} to {numbers.max()} ({numbers.dtype})"
        )
    return numbers.astype(np.int64)


def resolve_expected(
    counts: NDArray[np.int64], names: Sequence[str], given: Mapping[str, float] | None
) -> Vector:
    """Return the number by which the sum over the rows of each domain is divided.

    Args:
        counts: the rows of each domain in the batch, shape ``(m,)``; the result where nothing is given.

    Returns:
        Shape ``(m,)``; NaN where a domain has neither rows nor an expected number.
    """
    if given is None:
        return np.where(counts > 0, counts, np.nan)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(
            f"unknown domain {unknown[0]!r} in expected_counts; the domains are {', '.join(names)}"
        )
    expected = np.array([given.get(name, np.nan) for name in names], dtype=np.float64)
    wrong = (counts > 0) & ~(np.isfinite(expected) & (expected > 0))
    if wrong.any():
        name = names[int(np.flatnonzero(wrong)[0])]
        raise ValueError(
            f"expected_counts must say how many rows of {name!r} a step has, as it is in the batch; got "
            f"{given.get(name)}"
        )
    return expected
