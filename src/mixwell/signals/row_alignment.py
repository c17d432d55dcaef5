"""Rows count by how well their gradients agree with the validation gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.signals.directional import Derivatives
from mixwell.signals.probes import Probes
from mixwell.signals.row_weighting import Level, RowWeighting, expect_probes
from mixwell.typing import Gradients, Json, Vector


@final
class RowAlignment(RowWeighting):
    """Learning to Reweight: rows whose gradient points where the validation gradient does (Ren et al. 2018).

    ``v_i = max(0, <grad L_V(theta), grad l_i(theta)>)``, normalized over the batch (zeros where all are zero): by
    how much ``eps_i`` lowers the validation loss after one gradient step on ``sum_i eps_i l_i``, at ``eps = 0``.

    The products of a batch are one pass in forward mode
    (:class:`mixwell.signals.directional.Derivatives`). The validation
    gradient is that of the loop, taken when a round ends and used for all steps of the next, so that with a
    horizon of 1 it is always at the parameters of the step, as published. For the first round it is taken from the
    probes.

    Args:
        level: ``"rows"``: weigh every row; ``"domains"``: give each domain the sum over its rows as its weight
            (:class:`mixwell.signals.row_weighting.RowWeighting` says how).

    Raises:
        ValueError: there is no such level.

    References:
        Ren, Zeng, Yang, Urtasun, "Learning to Reweight Examples for Robust Deep Learning" (2018), Algorithm 1.
    """

    def __init__(self, level: Level = "rows") -> None:
        super().__init__(level, normalize=True)

    def __repr__(self) -> str:
        return f"RowAlignment({self.level!r})"

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Take the memory of a validation gradient.

        Args:
            optimizer: not used.
            parameters: what is trained.
            domains: their names.
            probes: with the losses of rows and a validation set.

        Raises:
            ValueError: probes are missing, or it is in use by another mixer.
        """
        self._probes = expect_probes(self, probes, validation=True)
        self._derivatives = Derivatives(self._probes, parameters)
        super().attach(optimizer, parameters, domains, probes)
        self._validation = [torch.zeros_like(p) for p in parameters.tensors]

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Keep the validation gradient; where there is none yet, take one.

        Args:
            round_index: its number.
            weights: of the domains, shape ``(m,)``.
            validation: the validation gradient at the current parameters, ``None`` in the first round.
        """
        super().begin_round(round_index, weights, validation)
        if validation is None:
            with self._derivatives.evaluating():
                validation = self._derivatives.mean_gradient(self._probes.validation_batch())
        with torch.no_grad():
            for own, gradient in zip(self._validation, validation, strict=True):
                if gradient is None:
                    own.zero_()
                else:
                    own.copy_(gradient)

    def _row_weights(self, losses: Tensor, segments: RowGroups, data: Any) -> Tensor:
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
    def nbytes(self) -> int:
        """The memory of the validation gradient."""
        return sum(t.nbytes for t in self._validation)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What was added up, and the validation gradient of the round."""
        values, tensors = super().state()
        named = zip(self._parameters.names, self._validation, strict=True)
        return values, tensors | {f"validation.{name}": tensor for name, tensor in named}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
        super().load_state(values, tensors)
        for name, own in zip(self._parameters.names, self._validation, strict=True):
            own.copy_(tensors[f"validation.{name}"])
