"""The rows of each domain in a round, and the effective size of a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from mixwell.typing import Vector
from mixwell.utils.user_warnings import warn_user

ROWS_IGNORE_WEIGHTS = "the rows of a step do not follow the weights"
"""The beginning of the warning, for filters."""
LOW = 0.6
"""The part of a batch's rows below which its effective size is worth a warning."""


def effective_rows(weights: Vector, rows: Vector) -> float:
    """Return the number of equally weighted rows with a mean gradient as noisy as the weighted one.

    The gradient ``sum_j w_j g_j`` with ``g_j`` the mean over ``n_j`` rows has ``sum_j w_j^2 / n_j`` times the
    variance of one row's, if all rows are equally noisy; so it is worth ``1 / (sum_j w_j^2 / n_j)`` rows. That is
    ``sum_j n_j`` where rows follow the weights, and less everywhere else.

    Args:
        weights: w, shape ``(m,)``.
        rows: n, shape ``(m,)``; domains without rows do not count.

    Returns:
        At most the sum of the rows; 0 where there are none.

    Example:
        >>> rows = np.array([8.0, 8.0])
        >>> effective_rows(np.array([0.5, 0.5]), rows), effective_rows(np.array([1.0, 0.0]), rows)
        (16.0, 8.0)
    """
    present = rows > 0
    if not present.any():
        return 0.0
    shares = weights[present] / weights[present].sum()
    return float(1 / (shares**2 / rows[present]).sum())


@final
class RowCounts:
    """Counts the rows of a round, and warns once where weighting the losses wastes much of the batch."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._warned = False
        self.clear()

    def clear(self) -> None:
        """Begin a round."""
        self._rows = np.zeros(len(self._names))
        self._wanted = not self._warned  # whether to look at the model's inputs where rows are not known
        self.drop_step()

    def drop_step(self) -> None:
        """Forget the rows of a step that did not end."""
        self._step_rows = np.zeros(len(self._names))

    def end_step(self) -> None:
        """Look no more where all domains were seen. Whole steps are counted, with all their micro-batches."""
        self._rows += self._step_rows
        self.drop_step()
        self._wanted = not self._warned and not self._rows.all()

    def add(self, domain: int, rows: float) -> None:
        """Count rows of the current step."""
        self._step_rows[domain] += rows

    @contextmanager
    def observe(self, rows: int | None, model: nn.Module | None) -> Generator[Callable[[], int]]:
        """Count the rows of a block.

        Args:
            rows: their number, if it is known; else the inputs of the model are counted.

        Yields:
            A function that returns the number for :meth:`add`, 0 where it is not known.
        """
        if rows is not None or not self._wanted or model is None:
            yield lambda: rows or 0
            return
        with count_inputs(model) as counted:
            # Inputs of length 1 are as likely packed sequences, where rows are not seen.
            yield lambda: 0 if set(counted) == {1} else sum(counted)

    def check(self, weights: Vector) -> None:
        """Warn, once in a run, where the rows of the round are far from following the weights."""
        total = float(self._rows.sum())
        # The rows of only some domains cannot be compared with the weights of all.
        if self._warned or not self._rows.all():
            return
        part = effective_rows(weights, self._rows) / total
        if part >= LOW:
            return
        self._warned = True
        largest = int(weights.argmax())
        warn_user(
            f"{ROWS_IGNORE_WEIGHTS}: {self._names[largest]!r} has {weights[largest]:.0%} of the weight and "
            f"{self._rows[largest] / total:.0%} of the rows, so the gradient is as noisy as one of {part:.0%} of "
            "the batch. Draw rows in proportion to mixer.weights.last, as mixwell.MixtureLoader does, and take "
            "the mean loss of each domain's rows in mixer.domain as before"
        )


@contextmanager
def count_inputs(model: nn.Module) -> Generator[list[int]]:
    """Count the rows that a model is given: the length of the first tensor of each call.

    Yields:
        A list to which every call appends.
    """
    found: list[int] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # nothing of this must be traced into the compiled model
            return
        tensors = (one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor) and one.dim())
        first = next(tensors, None)
        if first is not None:
            found.append(len(first))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
