r"""Linear regression with a best mixture that is known in closed form.

Domain :math:`j` has rows :math:`(x, y)` with :math:`y = a_j \cdot x + \epsilon`. All domains have the same input
covariance :math:`H`, of condition 30, and :math:`\epsilon` is noise of variance :math:`\sigma^2`. The loss of
weights :math:`w` on the simplex is

.. math::

    L(\theta; w) = \sum_j w_j \tfrac12 E_j (\theta \cdot x - y)^2
                 = \sum_j w_j \tfrac12 (\theta - a_j)^\top H (\theta - a_j) + \tfrac12 \sigma^2,
    \qquad \theta(w) = \sum_j w_j a_j,

since the covariances are equal. Validation and test have the minimizer :math:`a_V = \sum_j w^*_j a_j`, so that
:math:`\theta(w^*) = a_V`, and trained to the end with weights :math:`w` the model's excess validation loss is

.. math::

    F(w) - F(w^*) = \tfrac12 \Bigl\| \sum_j (w_j - w^*_j)\, a_j \Bigr\|_H^2 .

The :math:`a_j` are affinely independent: :math:`w^*` is the only best mixture. The rows are made so that all this
holds for the sample and not only on average: the second moment of each domain's inputs is exactly :math:`H`, and
its noise has mean square :math:`\sigma^2` and is orthogonal to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from mixwell.lab.packages import Say

DIMENSION = 24
CONDITION = 30.0
NOISE = 0.5
"""sigma, the standard deviation of the labels' noise."""
WEIGHTS = (0.40, 0.28, 0.18, 0.10, 0.02, 0.02)
"""w*, in the order of the domains."""
HELD_OUT = ("validation", "test")

Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def prepare(folder: Path, say: Say) -> None:
    """Do nothing: the rows are made when a run starts."""
    del folder, say


def optimum() -> Tensor:
    """Return the best mixture w*, float64 of shape ``(6,)``."""
    return torch.tensor(WEIGHTS, dtype=torch.float64)


def covariance() -> Tensor:
    """Return H, float64 of shape ``(24, 24)``, with eigenvalues between 1 / 30 and 1 in random directions."""
    directions = _directions()
    return directions * _eigenvalues() @ directions.T


def minimizers() -> Tensor:
    """Return the minimizers a_j of the domains, float64 of shape ``(6, 24)``.

    They lie in random directions, longer where the loss is flat, so that every direction matters equally.
    """
    random = torch.Generator().manual_seed(1)
    drawn = torch.randn(len(WEIGHTS), DIMENSION, generator=random, dtype=torch.float64)
    return drawn / _eigenvalues().sqrt() @ _directions().T * (2 / DIMENSION**0.5)


def excess(weights: Tensor) -> float:
    """Return F(w) - F(w*) for weights w, float64 of shape ``(6,)``, with sum 1."""
    away = (weights - optimum()) @ minimizers()
    return float(away @ covariance() @ away) / 2


@cache
def regression(part: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of a domain or of a held-out set.

    Args:
        part: ``validation``, ``test``, or the number of a domain, from 0.
        rows: more than the inputs' dimension.

    Returns:
        Inputs of shape ``(rows, 24)`` and labels of shape ``(rows,)``, float32.

    Raises:
        ValueError: There are too few rows for a second moment of full rank.
    """
    if rows <= DIMENSION:
        raise ValueError(f"{part} needs more rows than the dimension {DIMENSION}, got {rows}")
    held_out = part in HELD_OUT
    slope = optimum() @ minimizers() if held_out else minimizers()[int(part)]
    seed = 100 + (HELD_OUT.index(part) if held_out else 2 + int(part))
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, DIMENSION + 1, generator=random, dtype=torch.float64)
    # columns that are orthogonal with mean square 1: the last one is the noise
    columns = torch.linalg.qr(drawn).Q * rows**0.5
    inputs = columns[:, :-1] * _eigenvalues().sqrt() @ _directions().T
    labels = inputs @ slope + NOISE * columns[:, -1]
    return inputs.float(), labels.float()


def linear() -> tuple[nn.Linear, Loss, Loss]:
    """Return the model, initially zero, its mean loss and its loss of every row."""
    model = nn.Linear(DIMENSION, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, mean_loss, row_losses


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return half of the mean squared error."""
    return row_losses(model, batch).mean()


def row_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return half of the squared error of every row, shape ``(rows,)``."""
    inputs, labels = batch
    return (model(inputs).squeeze(1) - labels).square() / 2


def _eigenvalues() -> Tensor:
    return torch.logspace(0, 1, DIMENSION, base=1 / CONDITION, dtype=torch.float64)


def _directions() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(DIMENSION, DIMENSION, generator=random, dtype=torch.float64)).Q
