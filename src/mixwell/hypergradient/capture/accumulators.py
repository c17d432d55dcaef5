"""Sums of the gradients of a mixed batch, domain by domain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import final

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from mixwell.hypergradient.capture.projections import Projection, Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Vector

# A block of a gradient of this size stays in a core's cache while it is added to the trace and to the sum.
BLOCK = 1 << 17
# Sufficient to see whether two gradients are the same.
CHECK_RANK = 4


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
        """Parameters of which the layers do not see the whole gradient; it is not taken from them."""
        self.paused = False
        """Whether a backward pass is not to be added."""
        self.touched = False
        """Whether a layer was run."""

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
    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        """Return an empty accumulator that takes the same saved inputs, and its projections.

        It serves to compare the sums of one batch with gradients.
        """

    @abstractmethod
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``outputs^T inputs`` over the rows of every domain.

        Args:
            outputs: the result of :meth:`project_outputs`, shape ``(rows, length, a)``.
            inputs: the result of :meth:`project_inputs`, shape ``(rows, length, b)``.
        """

    @abstractmethod
    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        """Add the gradients of rows of a table.

        Args:
            looked_up: row indices, shape ``(rows, length)``; -1 for none.
            gradients: of the rows that were looked up, shape ``(rows, length, inputs)``.
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
        parameters: the trained parameters.
        weights: the factors of the rows' losses by domain, shape ``(m,)``; gradients are divided by them.
        add: takes ``(domain, index, gradient, factor, rows)``; ``rows`` are the rows of the parameter
            that the gradient belongs to, ``None`` for all.
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

    @override
    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        projections = Projections(self._parameters, CHECK_RANK, seed=0)
        projections.resample(0)
        return ProjectedAccumulator(projections, self.row_groups, late=True), projections

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

    def add_products_and_sum(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add ``dY^T X`` over the rows of every domain, and return their sum, shape ``(a, b)``.

        It proceeds by blocks, so that a product is still in the cache when it is added to the sum and the trace.

        Args:
            outputs: dY, shape ``(rows, length, a)``.
            inputs: X, shape ``(rows, length, b)``.
        """
        groups = self.row_groups
        outputs, inputs = (groups.sort_rows(one).flatten(0, 1) for one in (outputs, inputs))
        length = len(outputs) // len(groups)
        count, width = outputs.shape[1], inputs.shape[1]
        whole = outputs.new_empty(count, width)
        ignored = index in self.ignored
        in_blocks = not outputs.is_cuda and (ignored or self._blockwise(index))
        size = max(BLOCK // width, 1) if in_blocks else count
        scratch = outputs.new_empty(min(size, count), width) if len(groups.slices) > 1 else whole
        for start in range(0, count, size):
            block = slice(start, min(start + size, count))
            total = whole[block]
            for position, (domain, begin, end) in enumerate(groups.slices):
                product = scratch[: len(total)] if position else total
                rows = slice(begin * length, end * length)
                torch.mm(outputs[rows, block].t(), inputs[rows], out=product)
                if position:
                    total.add_(product)
                if not ignored:
                    self._add(domain, index, product, self._factors[domain], block)
        return whole

    @override
    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        if index in self.ignored:
            return
        looked_up, gradients = (self.row_groups.sort_rows(one) for one in (looked_up, gradients))
        for domain, begin, end in self.row_groups.slices:
            rows, local = looked_up[begin:end].flatten(), gradients[begin:end].flatten(0, 1)
            local = local.masked_fill((rows < 0).unsqueeze(-1), 0.0)
            table = torch.zeros_like(self._parameters.tensors[index], dtype=local.dtype)
            self.add_gradient(index, domain, table.index_add_(0, rows.clamp_min(0), local))

    @override
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        if index in self.ignored:
            return
        totals = gradients.new_zeros(len(self._factors), gradients.shape[-1])
        self.row_groups.add_sums(totals, gradients)
        for domain, _, _ in self.row_groups.slices:
            self.add_gradient(index, domain, totals[domain].view(self._parameters.tensors[index].shape))

    @override
    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        self._add(domain, index, gradient, self._factors[domain], None)


@final
class ProjectedAccumulator(GradientAccumulator):
    """Projected gradients, one row of numbers per domain.

    Args:
        rows: the sums, shape ``(m, size)``; by default new zeros.
        late: project when gradients are added, not before.
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
        self._projections, self._late = projections, late
        self.rows = projections.empty_rows(len(row_groups.counts)) if rows is None else rows
        """Shape ``(m, size)``."""
        self._blocks: dict[int, Tensor] = {}

    @override
    def projection(self, index: int) -> Projection | None:
        return None if self._late else self._projections.each[index]

    @override
    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        return ProjectedAccumulator(self._projections, self.row_groups, late=self._late), self._projections

    @override
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``(dY B)^T (X A)``."""
        if index in self.ignored:
            return
        if self._late:
            projection = self._projections.each[index]
            outputs, inputs = projection.project_outputs(outputs), projection.project_inputs(inputs)
        self.row_groups.add_products(self._block(index), outputs, inputs)

    @override
    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        """Add ``B[looked_up]^T (dY A)``: the inputs of an embedding are one-hot, so rows of B stand for them."""
        if index in self.ignored:
            return
        projection = self._projections.each[index]
        table = projection.matrix("outputs", projection.dtype)
        if table is None:
            table = torch.eye(projection.outputs, dtype=projection.dtype, device=gradients.device)
        chosen = functional.embedding(looked_up.clamp_min(0), table)
        chosen = chosen.masked_fill((looked_up < 0).unsqueeze(-1), 0.0)
        self.row_groups.add_products(self._block(index), chosen, projection.project_inputs(gradients))

    @override
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector, which are not projected."""
        if index not in self.ignored:
            self.row_groups.add_sums(self._block(index).flatten(1), gradients)

    @override
    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add ``B^T G A``."""
        self._block(index)[domain].add_(self._projections.each[index].project(gradient))

    def _block(self, index: int) -> Tensor:
        """The sums of a parameter, shape ``(m, r, r)``."""
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = self._projections.block(self.rows, index)
        return block
