"""What a method may compute beside training: losses of fresh rows, under the model or another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from mixwell.typing import LossFn

FORWARD = 1 / 3
"""Cost of a forward pass alone, in gradients of the same rows: a backward pass takes about twice as long."""


@final
class Probes:
    """Batches that are not trained on, and losses of them; what they cost is counted.

    Some methods look further than the gradients of a step: twin networks, short trials with other weights,
    products with the Hessian. They are given this to do it with.

    Args:
        model: that is trained.
        loss: ``loss(model, batch)``, the mean over the batch.
        domains: by domain a function that gives its next batch of rows, drawn apart from training steps.
        validation: gives the next validation batch; ``None`` where there is no validation set.
        row_losses: ``row_losses(model, batch)``, of every row; ``None`` where only their mean is known.

    Example:
        >>> line = torch.nn.Linear(1, 1)
        >>> square = lambda model, x: model(x).square().mean()
        >>> probes = Probes(line, square, {"a": lambda: torch.ones(4, 1)})
        >>> probes.loss(line, probes.batch("a")).backward()
        >>> value = probes.value(line, probes.batch("a"))
        >>> round(probes.spent, 2)
        5.33
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFn,
        domains: Mapping[str, Callable[[], Any]],
        validation: Callable[[], Any] | None = None,
        row_losses: LossFn | None = None,
    ) -> None:
        self.model = model
        self.names = tuple(domains)
        self._loss, self._rows = loss, row_losses
        self._domains, self._validation = dict(domains), validation
        self.spent = 0.0
        """What was computed, in rows of which a gradient was taken."""

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation set."""
        return self._validation is not None

    @property
    def has_rows(self) -> bool:
        """Whether the loss of every row is known."""
        return self._rows is not None

    def expect(self, domains: Sequence[str], signal: object) -> None:
        """Refuse to serve a signal that needs rows which are not here.

        Args:
            domains: of which rows are needed.
            signal: that needs them, for the message.

        Raises:
            ValueError: rows of a domain are missing.
        """
        missing = [name for name in domains if name not in self.names]
        if missing:
            raise ValueError(
                f"{signal!r} needs rows of every domain, but the probes have none of {', '.join(missing)} (only "
                f"{', '.join(self.names)}); give them in Probes(model, loss, domains)"
            )

    def batch(self, name: str) -> Any:
        """The next rows of a domain.

        Args:
            name: of the domain.

        Returns:
            What the losses take.
        """
        return self._domains[name]()

    def validation_batch(self) -> Any:
        """The next rows of the validation set.

        Returns:
            What the losses take.
        """
        assert self._validation is not None
        return self._validation()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, of which a gradient will be taken.

        Args:
            model: the model, or a copy of it.
            batch: rows.

        Returns:
            One number, with its graph.
        """
        self.charge(batch)
        return self._loss(model, batch)

    def row_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of every row of a batch, of which a gradient will be taken.

        Args:
            model: the model, or a copy of it.
            batch: rows.

        Returns:
            Shape ``(rows,)``, with its graph.
        """
        assert self._rows is not None
        self.charge(batch)
        losses = self._rows(model, batch)
        return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses

    @torch.no_grad()
    def value(self, model: nn.Module, batch: Any) -> float:
        """The mean loss of a batch, without a gradient.

        Args:
            model: the model, or a copy of it.
            batch: rows.

        Returns:
            The loss.
        """
        self.charge(batch, FORWARD)
        return float(self._loss(model, batch))

    def charge(self, batch: Any, times: float = 1.0) -> None:
        """Count something that was computed otherwise, such as a product with the Hessian.

        Args:
            batch: its rows.
            times: how much it costs beside a gradient of them.
        """
        self.spent += times * rows_of(batch)


def rows_of(batch: Any) -> int:
    """How many rows a batch has.

    Args:
        batch: a tensor, a mapping, a tuple or a list, of columns or of rows.

    Returns:
        Their number.
    """
    if isinstance(batch, Mapping):
        return rows_of(next(iter(batch.values())))
    columns = isinstance(batch, tuple | list) and isinstance(batch[0], Tensor | Mapping | tuple | list)
    return rows_of(batch[0]) if columns else len(batch)
