"""Learning to Reweight: rows count by the alignment of their gradients with the validation gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.signals.finite_draws import VALIDATION, FiniteDraws
from mixwell.signals.probe_derivatives import ProbeDerivatives
from mixwell.signals.probes import Probes, evaluation_mode, require_probes
from mixwell.signals.row_weighting import RowWeighting
from mixwell.typing import Gradients, Vector


@final
@dataclass(eq=False)
class RowAlignment(RowWeighting):
    """Rows count by how their gradients align with the validation gradient (Learning to Reweight).

    ``v_i = max(0, <grad L_V(theta), grad l_i(theta)>)``, normalized over the batch (zeros where all are zero): by
    how much ``eps_i`` lowers the validation loss after one gradient step on ``sum_i eps_i l_i``, at ``eps = 0``.

    The products of a batch are one pass in forward mode (:mod:`mixwell.signals.probe_derivatives`). The
    validation gradient is that of the loop, taken when a round ends and used for all steps of the next, so that
    with a horizon of 1 it is always at the parameters of the step, as published. For the first round, and
    after one whose validation gradient was skipped, it is taken from the probes.

    References:
        Ren, Zeng, Yang, Urtasun, "Learning to Reweight Examples for Robust Deep Learning" (2018), Algorithm 1.
    """

    normalize: bool = field(default=True, init=False, repr=False)

    _saved = (*RowWeighting._saved, "_validation")

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(self, probes, self._parameters, validation=True, row_losses=True)
        self._draws = FiniteDraws(self._probes, self._reject)
        self._derivatives = ProbeDerivatives(self._probes, self._parameters)
        super()._attach(optimizer, probes)
        self._validation = [torch.zeros_like(p) for p in self._parameters.tensors]

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        super().begin_round(round_index, weights, validation)
        if validation is None:
            with evaluation_mode(self._probes.model):
                validation = self._draws.compute(
                    VALIDATION,
                    self._derivatives.mean_gradient,
                    lambda found: self._parameters.non_finite(found) is None,
                )
        if validation is None:
            return  # that of the round before remains
        with torch.no_grad():
            for own, gradient in zip(self._validation, validation, strict=True):
                if gradient is None:
                    own.zero_()
                else:
                    own.copy_(gradient)

    @override
    def _row_weights(self, losses: Tensor, groups: RowGroups, data: Any) -> Tensor:
        if data is None:
            raise ValueError(
                f"{self!r} needs the rows of a mixed batch: batch.weighted_loss(losses, data=rows)"
            )
        _, products = self._derivatives.along(data, self._validation)
        if products.shape != losses.shape:
            raise ValueError(
                f"batch.weighted_loss was given {len(losses)} losses and data of {len(products)} rows; both must "
                "be of the same rows, and row_losses of the probes must take such data"
            )
        return products.clamp(min=0)

    @property
    @override
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._validation)
