"""The gradients of a mixed batch, folded into traces of full size as they come about."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from mixwell.hypergradient.capture.accumulators import DenseAccumulator, ProjectedAccumulator
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Vector

if TYPE_CHECKING:
    from mixwell.hypergradient.traces.dense import FirstOrderTraces

# A block of a gradient of so many numbers stays in a core's cache while it is added to the trace and to the sum.
BLOCK = 1 << 17
# Enough to see whether two gradients are the same.
CHECK_RANK = 4


@final
class TraceAccumulator(DenseAccumulator):
    """Adds the gradient of every domain to its trace.

    Args:
        traces: of all domains.
        parameters: what is trained.
        segments: which rows belong to which domain.
        weights: by which the losses of the rows are weighted, shape ``(m,)``.
    """

    def __init__(
        self, traces: FirstOrderTraces, parameters: Parameters, segments: RowGroups, weights: Vector
    ) -> None:
        super().__init__(segments)
        self._traces, self._parameters = traces, parameters
        self._factors: list[float] = (1 / weights).tolist()

    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        """Sums of the same batch, small and apart from the traces.

        Returns:
            The sums and their projections.
        """
        projections = Projections(self._parameters, CHECK_RANK, seed=0)
        projections.draw(0)
        return ProjectedAccumulator(projections, self.segments, late=True), projections

    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``dY^T X`` over the rows of every domain.

        Args:
            index: which parameter.
            outputs: dY.
            inputs: X.
        """
        if index in self.ignored:
            return
        parameter = self._parameters.tensors[index]
        # Of autocast one may be in bfloat16 and the other not.
        outputs, inputs = (self.segments.sorted(one).to(parameter.dtype) for one in (outputs, inputs))
        for domain, begin, end in self.segments.present:
            product = outputs[begin:end].flatten(0, 1).t() @ inputs[begin:end].flatten(0, 1)
            self.add_gradient(index, domain, product.view(parameter.shape))

    def add_whole_products(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add ``dY^T X`` over the rows of every domain, and give their sum.

        It goes block by block, so that a product is still in the cache when it is added to the sum and the trace.

        Args:
            index: which parameter.
            outputs: dY, shape ``(rows, length, a)``.
            inputs: X, shape ``(rows, length, b)``.

        Returns:
            The gradient of all rows, shape ``(a, b)``.
        """
        outputs, inputs = (
            self.segments.sorted(outputs).flatten(0, 1),
            self.segments.sorted(inputs).flatten(0, 1),
        )
        places = len(outputs) // len(self.segments)
        count, width = outputs.shape[1], inputs.shape[1]
        whole = outputs.new_empty(count, width)
        size = count if outputs.is_cuda else max(BLOCK // width, 1)
        scratch = outputs.new_empty(min(size, count), width) if len(self.segments.present) > 1 else whole
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            total = whole[part]
            for place, (domain, begin, end) in enumerate(self.segments.present):
                product = scratch[: len(total)] if place else total
                rows = slice(begin * places, end * places)
                torch.mm(outputs[rows, part].t(), inputs[rows], out=product)
                if place:
                    total.add_(product)
                if index not in self.ignored:
                    self._traces.fold(domain, index, product, self._factors[domain], part)
        return whole

    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        """Add the gradients of rows of a table.

        Args:
            index: which parameter.
            looked_up: numbers of rows; -1 for none.
            gradients: of what was looked up.
        """
        if index in self.ignored:
            return
        looked_up, gradients = self.segments.sorted(looked_up), self.segments.sorted(gradients)
        for domain, begin, end in self.segments.present:
            rows, own = looked_up[begin:end].flatten(), gradients[begin:end].flatten(0, 1)
            own = own.masked_fill((rows < 0).unsqueeze(-1), 0.0)
            table = torch.zeros_like(self._parameters.tensors[index], dtype=own.dtype)
            self.add_gradient(index, domain, table.index_add_(0, rows.clamp_min(0), own))

    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector.

        Args:
            index: which parameter.
            gradients: shape ``(rows, length, n)``.
        """
        if index in self.ignored:
            return
        totals = gradients.new_zeros(len(self._factors), gradients.shape[-1])
        self.segments.add_sums(totals, gradients)
        for domain, _, _ in self.segments.present:
            self.add_gradient(index, domain, totals[domain].view(self._parameters.tensors[index].shape))

    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add a domain's gradient to its trace.

        Args:
            index: which parameter.
            domain: whose.
            gradient: of the parameter's shape.
        """
        self._traces.fold(domain, index, gradient, self._factors[domain])
