"""Losses of no domain (``with mixer.auxiliary():``), which are added to the combined gradient with weight 1."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch

from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.batch import DomainBatch
from mixwell.mixer.gradient_collector import GradientCollector
from mixwell.mixer.gradient_sum import WeightedSum
from mixwell.mixer.nonfinite import NonFiniteGuard
from mixwell.mixer.records import AUXILIARY
from mixwell.mixer.scopes import DomainScope


@final
class AuxiliaryGradients:
    """Adds gradients that do not depend on the weights, so that they leave no trace.

    Args:
        total: the weighted sum of the domains' gradients. In a step of mixed batches, whose gradients accumulate
            on the parameters, it takes those of the auxiliary losses alone.
    """

    def __init__(
        self,
        parameters: Parameters,
        collector: GradientCollector,
        nonfinite: NonFiniteGuard,
        total: WeightedSum,
    ) -> None:
        self._parameters, self._collector = parameters, collector
        self._nonfinite, self._total = nonfinite, total

    @contextmanager
    def add_to_sum(self, step: int) -> Generator[DomainScope]:
        """Add the gradient that is computed inside to the weighted sum.

        Yields:
            The scope, with which the loss can be checked.
        """
        with self._collector.collect(DomainBatch(AUXILIARY), step) as scope:
            yield scope
        with self._parameters.full_precision():
            if self._nonfinite.accept_scope(scope, step, self._parameters):
                self._total.add(scope.gradients, 1.0)
        scope.gradients = []

    @contextmanager
    def add_to_batches(self, step: int) -> Generator[DomainScope]:
        """Accumulate the gradient that is computed inside on the parameters, to that of the mixed batches.

        Yields:
            The scope, with which the loss can be checked.
        """
        self._collector.expect_ready(AUXILIARY, first=False)
        tensors = self._parameters.tensors
        # Gradients may be views of the buckets of DistributedDataParallel, so they cannot be put aside.
        before = [None if p.grad is None else p.grad.detach().clone() for p in tensors]
        scope = DomainScope(DomainBatch(AUXILIARY))
        try:
            with self._collector.accumulate(AUXILIARY, step):
                yield scope
        except BaseException:
            self._restore(before)
            raise
        with self._parameters.full_precision():
            scope.gradients = [p.grad for p in tensors]
            if self._nonfinite.accept_scope(scope, step, self._parameters):
                self._total.add(scope.gradients, 1.0)
                self._total.add(before, -1.0)
            else:
                self._restore(before)
        scope.gradients = []

    @torch.no_grad()
    def _restore(self, before: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters.tensors, before, strict=True):
            if gradient is None or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        self._collector.note_gradients()
