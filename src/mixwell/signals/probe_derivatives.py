"""Directional derivatives of every row's loss, for methods that weight single rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixwell.hypergradient.parameters import Parameters, cuda_devices
from mixwell.signals.probes import Probes, parameter_gradients
from mixwell.typing import Gradients, LossFn


@final
class ProbeDerivatives:
    """Derivatives of the probes' losses by the trained parameters.

    ``<grad l_i(theta), v>`` of all rows i at once is one pass in forward mode: every layer computes its value and
    the value's change along v. That is exact, takes the matrix products that a gradient takes, and stores no
    activations. Where an operation of the model has no forward mode (PyTorch's ``NotImplementedError``; such as
    reentrant checkpointing), the weighted gradient ``sum_i r_i grad l_i`` is differentiated by its weights r
    instead, which is exact too and costs a second gradient. Attention is computed by its plain formula, since its
    fused kernels support neither.

    All is computed in the model's current mode. ``.grad``, buffers (running statistics of BatchNorm) and the
    random stream of the run are unchanged.

    Args:
        parameters: those of the same model (:func:`mixwell.signals.probes.require_probes` checks it).
    """

    def __init__(self, probes: Probes, parameters: Parameters) -> None:
        self._probes, self._parameters = probes, parameters
        names = {id(p): name for name, p in probes.model.named_parameters()}
        self._names = [names[id(p)] for p in parameters.tensors]
        self._forward_mode = True

    def along(self, batch: Any, direction: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the loss of every row, and its derivative along a direction.

        In training mode dropout draws other masks here than those of a training step on the same rows.

        Args:
            direction: v, a tensor for each parameter; ``None`` counts as zeros.

        Returns:
            ``l_i(theta)`` and ``<grad l_i(theta), v>``, each of shape ``(rows,)``, without a graph.
        """
        if self._forward_mode:
            try:
                return self._by_forward_mode(batch, direction)
            except NotImplementedError:
                self._forward_mode = False
        self._probes.charge(batch)
        return self._by_two_backward_passes(batch, direction)

    def row_gradient(self, batch: Any, row_weights: Callable[[Tensor], Tensor]) -> tuple[Tensor, Gradients]:
        """Return the rows' losses and a weighted sum of their gradients, ``sum_i r_i grad l_i(theta)``.

        Args:
            row_weights: computes r from the losses; both of shape ``(rows,)`` and without a graph.
        """
        with self._rng_kept(), torch.enable_grad():
            losses = self._call(self._probes.row_losses, batch, {})
            known = losses.detach()
            weighted = (row_weights(known).to(losses) * losses).sum()
            return known, parameter_gradients(self._parameters, weighted)

    def mean_gradient(self, batch: Any, at: Sequence[Tensor] | None = None) -> Gradients:
        """Return the gradient of the mean loss of a batch, at the parameters or at other values ``at`` of them."""
        with self._rng_kept(), torch.enable_grad():
            values: dict[int, Tensor] = {}
            if at is not None:
                tensors = enumerate(self._parameters.tensors)
                values = {i: at[i].detach().requires_grad_() for i, p in tensors if p.requires_grad}
            loss = self._call(self._probes.loss, batch, values)
            return parameter_gradients(self._parameters, loss, values=values)

    def _by_forward_mode(self, batch: Any, direction: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        pairs = enumerate(zip(self._parameters.tensors, direction, strict=True))
        with self._rng_kept(), torch.no_grad(), forward_ad.dual_level():
            values = {i: _dual(p, v) for i, (p, v) in pairs if v is not None}
            losses = self._call(self._probes.row_losses, batch, values)
            primal, tangent = forward_ad.unpack_dual(losses)
            # There is no tangent where no loss depends on the parameters.
            return primal.clone(), torch.zeros_like(primal) if tangent is None else tangent.clone()

    def _by_two_backward_passes(
        self, batch: Any, direction: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        with self._rng_kept(), torch.enable_grad():
            losses = self._call(self._probes.row_losses, batch, {})
            weights = torch.zeros_like(losses, requires_grad=True)
            gradients = parameter_gradients(self._parameters, (weights * losses).sum(), create_graph=True)
            products = [
                (g * v.to(g)).sum()
                for g, v in zip(gradients, direction, strict=True)
                if g is not None and v is not None
            ]
            if not products:
                return losses.detach(), torch.zeros_like(losses)
            (found,) = torch.autograd.grad(torch.stack(products).sum(), weights)
        return losses.detach(), found

    def _call(self, loss: LossFn, batch: Any, values: Mapping[int, Tensor]) -> Tensor:
        """Compute a loss with other values of some parameters, and with copies of the buffers.

        The buffers are copied and not restored afterwards: a training step that has not run its backward pass yet
        may have saved them.
        """
        others = {f"model.{name}": b.clone() for name, b in self._probes.model.named_buffers()}
        others.update({f"model.{self._names[i]}": value for i, value in values.items()})
        with sdpa_kernel(SDPBackend.MATH):
            return cast("Tensor", functional_call(_Called(self._probes.model, loss), others, (batch,)))

    def _rng_kept(self) -> AbstractContextManager[None]:
        """Restore the random stream of the run afterwards."""
        return torch.random.fork_rng(cuda_devices(self._parameters.tensors))


@final
class _Called(nn.Module):
    """A loss as a module with the model's parameters."""

    def __init__(self, model: nn.Module, loss: LossFn) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # At the first call PyTorch loads some rules of forward mode through a deprecated function.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script", category=DeprecationWarning)
        return forward_ad.make_dual(value.detach(), tangent.to(value))
