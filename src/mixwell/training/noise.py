"""How noisy a domain's gradient is, from the two halves of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mixwell.typing import Indices


def backward_with_noise(
    parameters: Sequence[Tensor], backward: Callable[[Indices], float], first: Indices, second: Indices
) -> tuple[float, float]:
    """The backward passes of two halves of a batch, and the noise of one row's gradient.

    With ``a`` and ``b`` rows the halves' gradients differ by noise alone:
    ``E |g_a - g_b|^2 = s^2 (1/a + 1/b)``.

    Args:
        parameters: have no gradients before, and that of the whole batch afterwards.
        backward: adds the gradient of a half's rows, divided by the rows of the whole batch, and gives its share
            of the mean loss.
        first: the rows of one half.
        second: those of the other.

    Returns:
        The mean loss of the whole, and an estimate of ``s``.
    """
    rows, whole = (len(first), len(second)), len(first) + len(second)
    loss = backward(first)
    kept = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    loss += backward(second)
    squared = 0.0
    with torch.no_grad():
        for parameter, part in zip(parameters, kept, strict=True):
            if parameter.grad is None:
                continue
            before = torch.zeros_like(parameter.grad) if part is None else part
            # The two parts carry the factors rows/whole; without them they are the halves' gradients.
            difference = before * (whole / rows[0]) - (parameter.grad - before) * (whole / rows[1])
            squared += float(difference.double().square().sum())
    return loss, (squared / (1 / rows[0] + 1 / rows[1])) ** 0.5
