"""Batches, losses and gradients for methods that compute outside of the training step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters, cuda_devices
from mixwell.typing import Gradients, LossFn
from mixwell.utils.costs import FORWARD


@final
class Probes:
    """Batches that are not trained on, and their losses; the cost is counted.

    Some methods need more than the gradients of a step: twin networks, short trials with other weights, Hessian
    products. They compute them from this.

    Args:
        model: the trained model.
        loss: ``loss(model, batch)``, the mean over the batch.
        domains: by domain a function that returns its next batch of rows, drawn independently of training steps.
        validation: returns the next validation batch; ``None`` where there is no validation set.
        row_losses: ``row_losses(model, batch)``, the loss of every row; ``None`` where only their mean is known.

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
        """The cost so far, in gradients of one row."""

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation set."""
        return self._validation is not None

    @property
    def has_row_losses(self) -> bool:
        """Whether the loss of every row is known."""
        return self._rows is not None

    def batch(self, name: str) -> Any:
        """Return the next rows of a domain, in the form that the losses take."""
        return self._domains[name]()

    def validation_batch(self) -> Any:
        """Return the next rows of the validation set, in the form that the losses take."""
        assert self._validation is not None
        return self._validation()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch with its graph, for a gradient of the model or of a copy of it."""
        self.charge(batch)
        return self._loss(model, batch)

    def row_losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of every row of a batch with its graph, shape ``(rows,)``."""
        assert self._rows is not None
        self.charge(batch)
        losses = self._rows(model, batch)
        return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses

    @torch.no_grad()
    def value(self, model: nn.Module, batch: Any) -> float:
        """Return the mean loss of a batch, without a gradient."""
        self.charge(batch, FORWARD)
        return float(self._loss(model, batch))

    def charge(self, batch: Any, times: float = 1.0) -> None:
        """Count another computation, such as a Hessian product, that costs ``times`` gradients of the batch."""
        self.spent += times * rows_of(batch)


def require_probes(
    signal: object,
    probes: Probes | None,
    parameters: Parameters,
    domains: Sequence[str] = (),
    *,
    validation: bool = False,
    row_losses: bool = False,
) -> Probes:
    """Return the probes of the loop, if they have what a signal requires.

    Args:
        signal: named in messages.
        domains: those with rows that are required.
        validation: whether a validation set is required.
        row_losses: whether the loss of every row is required.

    Raises:
        ValueError: there are none, they lack something or belong to another model, or there are other processes.
    """
    missing = ["validation=..."] if validation and (probes is None or not probes.has_validation) else []
    if row_losses and (probes is None or not probes.has_row_losses):
        missing.append("row_losses=...")
    if probes is None or missing:
        raise ValueError(
            f"{signal!r} computes losses outside of the training step: give Mixer(..., "
            f"probes=Probes({', '.join(['model', 'loss', 'domains', *missing])}))"
        )
    absent = [name for name in domains if name not in probes.names]
    if absent:
        raise ValueError(
            f"{signal!r} needs rows of every domain, but the probes have none of {', '.join(absent)} (only "
            f"{', '.join(probes.names)}); give them in Probes(model, loss, domains)"
        )
    known = {id(p) for p in probes.model.parameters()}
    pairs = zip(parameters.names, parameters.tensors, strict=True)
    other = next((name for name, p in pairs if id(p) not in known), None)
    if other is not None:
        raise ValueError(
            f"the probes have another model than the one that is trained ({other} is not in it); give Probes the "
            "same model as the Mixer"
        )
    distributed.require_single_process(signal)
    return probes


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: a tensor, a mapping, a tuple or a list, of columns or of rows."""
    if isinstance(batch, Mapping):
        return rows_of(next(iter(batch.values())))
    columns = isinstance(batch, tuple | list) and isinstance(batch[0], Tensor | Mapping | tuple | list)
    return rows_of(batch[0]) if columns else len(batch)


def modes(model: nn.Module) -> list[bool]:
    """Return ``training`` of every module of a model."""
    return [module.training for module in model.modules()]


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Put a model into evaluation mode inside: no dropout, BatchNorm's running statistics."""
    before = modes(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in zip(model.modules(), before, strict=True):
            module.training = mode


def evaluation_loss(probes: Probes, model: nn.Module, batch: Any) -> float:
    """Return the mean loss of a batch in evaluation mode; the run's random stream is restored."""
    with evaluation_mode(model), torch.random.fork_rng(cuda_devices(model.parameters())):
        return probes.value(model, batch)


def parameter_gradients(
    parameters: Parameters,
    outputs: Tensor | Sequence[Tensor],
    *,
    values: Mapping[int, Tensor] | None = None,
    **options: Any,
) -> Gradients:
    """Return the gradient of outputs by every parameter; ``None`` for one that is frozen or not used.

    Args:
        outputs: as :func:`torch.autograd.grad` takes them.
        values: tensors that the outputs were computed with in place of parameters, by index.
        options: of :func:`torch.autograd.grad`.
    """
    inputs = {
        i: (values or {}).get(i, tensor)
        for i, tensor in enumerate(parameters.tensors)
        if tensor.requires_grad
    }
    found = torch.autograd.grad(outputs, list(inputs.values()), allow_unused=True, **options)
    gradients: Gradients = [None] * len(parameters)
    for index, gradient in zip(inputs, found, strict=True):
        gradients[index] = gradient
    return gradients
