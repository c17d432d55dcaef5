"""Where the gradients of a mixed batch go, domain by domain: to full traces, or to projected sums.

Losses are weighted before the backward pass, so what arrives is ``w_j G_j``. A layer's rule adds to an accumulator
by parameter index; the accumulator sums over the rows of each domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from mixwell.hypergradient.capture.projection import Projection
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Vector

# Sufficient to see whether two gradients are the same.
CHECK_RANK = 4
# A block of a gradient of this size stays in a core's cache while it is added to the trace and to the sum.
BLOCK = 1 << 17
# The time to add one number to a matrix in memory, in floating-point operations of a matrix product (measured).
MEMORY_COST = 8


class GradientAccumulator(ABC):
    """Receives the gradients of layers during a backward pass of weighted losses.

    A layer's rule saves ``project_inputs(X)`` in the forward pass and adds products with ``project_outputs(dY)``
    in the backward pass.
    """

    compared_with_gradient: bool = False
    """Whether the owner compares the sums with the whole gradient at the end of a step."""

    def __init__(self, row_groups: RowGroups) -> None:
        self.row_groups = row_groups
        self.ignored: Container[int] = ()
        """Parameters whose gradients are not added, because hooks do not see all of them."""
        self.paused = False
        """Whether forward and backward passes are not captured."""
        self.touched = False
        """Whether a layer was run."""
        self.batch = 0
        """The number of batches that ended: what was run in one of them adds nothing later."""

    def discard(self, index: int) -> None:
        """Remove what was added for a parameter in this batch, as far as it is kept apart."""
        return None

    def projection(self, index: int) -> Projection | None:
        """Return the projection of a parameter's gradient, ``None`` for the identity."""
        return None

    def project_inputs(self, index: int, values: Tensor) -> Tensor:
        """Return ``X A``, from shape ``(..., inputs)`` to ``(..., b)``."""
        projection = self.projection(index)
        return values if projection is None else projection.project_inputs(values)

    def project_outputs(self, index: int, values: Tensor) -> Tensor:
        """Return ``dY B``, from shape ``(..., outputs)`` to ``(..., a)``."""
        projection = self.projection(index)
        return values if projection is None else projection.project_outputs(values)

    @abstractmethod
    def checking(self) -> ProjectedAccumulator:
        """Return an empty accumulator that takes the same saved inputs, to compare one batch with its gradient."""

    @abstractmethod
    def discarding(self, row_groups: RowGroups) -> GradientAccumulator:
        """Return an accumulator for other rows that keeps nothing, to compare two ways to the same gradient."""

    @abstractmethod
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``outputs^T inputs`` over the rows of every domain.

        Args:
            outputs: the result of :meth:`project_outputs`, shape ``(rows, length, a)``.
            inputs: the result of :meth:`project_inputs`, shape ``(rows, length, b)``.
        """

    @abstractmethod
    def add_products_and_sum(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add ``dY^T X`` over the rows of every domain, and return the sum over all rows, shape ``(a, b)``.

        Args:
            outputs: dY, shape ``(rows, length, a)``.
            inputs: X, shape ``(rows, length, b)``.
        """

    @abstractmethod
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector, such as a bias, shape ``(rows, length, n)``."""

    @abstractmethod
    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add a domain's gradient, which has the parameter's shape."""


@final
class DenseAccumulator(GradientAccumulator):
    """Passes the full gradient of every domain on.

    Args:
        weights: the factors of the rows' losses by domain, shape ``(m,)``; gradients are divided by them.
        add: takes ``(domain, index, gradient, factor, rows)``; the gradient is that of these rows of the
            parameter, of all for ``None``.
        blockwise: whether a parameter's gradient may be passed on in blocks of rows.
    """

    def __init__(
        self,
        parameters: Parameters,
        row_groups: RowGroups,
        weights: Vector,
        add: Callable[[int, int, Tensor, float, slice | None], None],
        blockwise: Callable[[int], bool],
    ) -> None:
        super().__init__(row_groups)
        self._parameters, self._add, self._blockwise = parameters, add, blockwise
        self._factors: list[float] = (1 / weights).tolist()
        self.added: set[int] = set()
        """Parameters that have received a gradient."""

    @override
    def discarding(self, row_groups: RowGroups) -> DenseAccumulator:
        weights = np.ones(len(row_groups.counts))
        return DenseAccumulator(self._parameters, row_groups, weights, lambda *_: None, self._blockwise)

    @override
    def checking(self) -> ProjectedAccumulator:
        projections = Projections(self._parameters, CHECK_RANK, seed=0)
        projections.resample(0)
        return ProjectedAccumulator(projections, self.row_groups, late=True)

    @override
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        if index in self.ignored:
            return
        parameter, groups = self._parameters.tensors[index], self.row_groups
        # Under autocast one may be in bfloat16 and the other not.
        outputs, inputs = (groups.sort_rows(one).to(parameter.dtype) for one in (outputs, inputs))
        for domain, begin, end in groups.slices:
            product = outputs[begin:end].flatten(0, 1).t() @ inputs[begin:end].flatten(0, 1)
            self.add_gradient(index, domain, product.view(parameter.shape))

    @override
    def add_products_and_sum(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        groups = self.row_groups
        outputs, inputs = (groups.sort_rows(one).flatten(0, 1) for one in (outputs, inputs))
        length = len(outputs) // len(groups)
        count, width = outputs.shape[1], inputs.shape[1]
        # In half precision the sum of rounded parts would lose digits.
        wide = torch.promote_types(outputs.dtype, torch.float32)
        halves = wide != outputs.dtype
        whole = outputs.new_empty(count, width, dtype=wide)
        # By blocks, so that a product is still in the cache when it is added to the sum and the trace. On a GPU
        # the launches of the kernels would cost more than that saves.
        in_blocks = not outputs.is_cuda and (index in self.ignored or self._blockwise(index))
        size = max(BLOCK // max(width, 1), 1) if in_blocks else count
        apart = halves or len(groups.slices) > 1
        scratch = outputs.new_empty(min(size, count), width) if apart else whole
        for start in range(0, count, size):
            block = slice(start, min(start + size, count))
            total = whole[block]
            for position, (domain, begin, end) in enumerate(groups.slices):
                # The product of the first domain is written where the sum is wanted.
                product = scratch[: len(total)] if position or halves else total
                rows = slice(begin * length, end * length)
                torch.mm(outputs[rows, block].t(), inputs[rows], out=product)
                if position:
                    total.add_(product)
                elif halves:
                    total.copy_(product)
                self.add_gradient(index, domain, product, block)
        return whole.to(outputs.dtype)

    @override
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        if index in self.ignored:
            return
        totals = gradients.new_zeros(len(self._factors), gradients.shape[-1])
        self.row_groups.add_sums(totals, gradients)
        for domain, _, _ in self.row_groups.slices:
            self.add_gradient(index, domain, totals[domain].view(self._parameters.tensors[index].shape))

    @override
    def add_gradient(self, index: int, domain: int, gradient: Tensor, rows: slice | None = None) -> None:
        """Add a domain's gradient, or some of its rows."""
        if index not in self.ignored:
            self.added.add(index)
            self._add(domain, index, gradient, self._factors[domain], rows)


@final
class ProjectedAccumulator(GradientAccumulator):
    """Adds up projected gradients, one row of numbers per domain.

    Args:
        rows: the sums, shape ``(m, size)``; by default new zeros.
        late: whether rules give unprojected inputs and outputs, as a :class:`DenseAccumulator` wants them.
    """

    compared_with_gradient = True

    def __init__(
        self,
        projections: Projections,
        row_groups: RowGroups,
        *,
        rows: Tensor | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(row_groups)
        self.projections, self._late = projections, late
        self.rows = projections.empty_rows(len(row_groups.counts)) if rows is None else rows
        # Views are cached: to make them for every layer costs more than the sums of a small layer.
        self._blocks: dict[int, Tensor] = {}

    @override
    def discard(self, index: int) -> None:
        self._block(index).zero_()

    @override
    def projection(self, index: int) -> Projection | None:
        return None if self._late else self.projections.each[index]

    @override
    def checking(self) -> ProjectedAccumulator:
        return self.discarding(self.row_groups)

    @override
    def discarding(self, row_groups: RowGroups) -> ProjectedAccumulator:
        return ProjectedAccumulator(self.projections, row_groups, late=self._late)

    @override
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``(dY B)^T (X A)``."""
        if index in self.ignored:
            return
        if self._late:
            projection = self.projections.each[index]
            outputs, inputs = projection.project_outputs(outputs), projection.project_inputs(inputs)
        self.row_groups.add_products(self._block(index), outputs, inputs)

    @override
    def add_products_and_sum(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add ``B^T G_j A`` of the ``G_j = dY_j^T X_j`` that the sum consists of, or ``(dY B)^T (X A)``.

        The first takes the products of all rows in parts and ``2 m a b r`` operations for the projections, the
        second ``2 (a + b) r`` operations for every position in addition to the sum.
        """
        if index in self.ignored:
            return outputs.flatten(0, 1).t() @ inputs.flatten(0, 1)
        if not self._separates(index, outputs, inputs):
            self.add_products(index, self.project_outputs(index, outputs), self.project_inputs(index, inputs))
            return outputs.flatten(0, 1).t() @ inputs.flatten(0, 1)
        whole: Tensor | None = None
        for domain, spans in self.row_groups.spans.items():
            # Rows in succession by their number, so that none are copied to sort them.
            product: Tensor | None = None
            for begin, end in spans:
                left, right = outputs[begin:end].flatten(0, 1).t(), inputs[begin:end].flatten(0, 1)
                product = left @ right if product is None else product.addmm_(left, right)
            assert product is not None
            self.add_gradient(index, domain, product)
            whole = product if whole is None else whole.add_(product)
        assert whole is not None
        return whole

    def _separates(self, index: int, outputs: Tensor, inputs: Tensor) -> bool:
        """Return whether the gradients of the domains take less time than projections of all positions."""
        groups, projection = self.row_groups, self.projections.each[index]
        # A sum of parts in half precision would lose their last digits.
        if outputs.dtype not in (torch.float32, torch.float64):
            return False
        rank, elements = max(projection.shape), outputs.shape[-1] * inputs.shape[-1]
        positions = 2 * rank * len(outputs) * outputs.shape[1] * (outputs.shape[-1] + inputs.shape[-1])
        own = 2 * rank * elements * len(groups.slices)
        if own >= positions:
            return False
        spans = groups.span_count
        # Many small products are what a GPU is slow at.
        if outputs.device.type != "cpu" and spans > len(groups.slices):
            return False
        return own + MEMORY_COST * elements * spans < positions

    @override
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector, which are not projected."""
        if index not in self.ignored:
            self.row_groups.add_sums(self._block(index).flatten(1), gradients)

    @override
    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add ``B^T G A``."""
        if index not in self.ignored:
            self._block(index)[domain].add_(self.projections.each[index].project(gradient))

    def _block(self, index: int) -> Tensor:
        """Return a view of the sums of a parameter, shape ``(m, r, r)``."""
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = self.projections.block(self.rows, index)
        return block
