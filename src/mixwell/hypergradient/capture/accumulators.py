"""Where the gradients of a mixed batch go, domain by domain: to full traces, or to projected sums.

Losses are weighted before the backward pass, so what arrives is ``w_j G_j``. A layer's rule adds to an accumulator
by parameter index; the accumulator sums over the rows of each domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import final

import numpy as np
from torch import Tensor
from typing_extensions import override

from mixwell.hypergradient.capture.projections import Projection, Projections
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Vector

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
        """Parameters whose gradients are not added, because hooks do not see all of them."""
        self.paused = False
        """Whether forward and backward passes are not captured."""
        self.touched = False
        """Whether a layer was run."""

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
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``outputs^T inputs`` over the rows of every domain.

        Args:
            outputs: the result of :meth:`project_outputs`, shape ``(rows, length, a)``.
            inputs: the result of :meth:`project_inputs`, shape ``(rows, length, b)``.
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

    def discarding(self) -> DenseAccumulator:
        """Return an accumulator for the same rows that keeps nothing, to compare two ways to the same gradient."""
        weights = 1 / np.array(self._factors)
        return DenseAccumulator(self._parameters, self.row_groups, weights, lambda *_: None, self._blockwise)

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

    def blockwise(self, index: int) -> bool:
        """Return whether a parameter's gradient may be added in blocks of rows."""
        return index in self.ignored or self._blockwise(index)


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
        return ProjectedAccumulator(self.projections, self.row_groups, late=self._late)

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
