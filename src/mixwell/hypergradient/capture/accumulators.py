"""Where the gradients of a mixed batch are added up, domain by domain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import RowGroups


class GradientAccumulator(ABC):
    """Takes the gradients of layers as they come about in a backward pass of weighted losses.

    Args:
        segments: which rows belong to which domain.
    """

    def __init__(self, segments: RowGroups) -> None:
        self.segments = segments
        self.ignored: Container[int] = ()
        """Parameters that layers do not see the whole gradient of, which are therefore not taken from them."""
        self.paused = False
        """Whether a backward pass is not to be added up."""
        self.touched = False
        """Whether a layer was run."""

    def inputs(self, index: int, values: Tensor) -> Tensor:
        """What is needed of the inputs of a parameter.

        Args:
            index: which parameter.
            values: X, shape ``(..., inputs)``.

        Returns:
            Shape ``(..., b)``.
        """
        return values

    def outputs(self, index: int, values: Tensor) -> Tensor:
        """What is needed of the gradients of a parameter's outputs.

        Args:
            index: which parameter.
            values: dY, shape ``(..., outputs)``.

        Returns:
            Shape ``(..., a)``.
        """
        return values

    def input_matrix(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """The matrix that :meth:`inputs` multiplies by.

        Args:
            index: which parameter.
            dtype: that is wanted.

        Returns:
            Shape ``(inputs, b)``, ``None`` for the identity.
        """
        return None

    @abstractmethod
    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``outputs^T inputs`` over the rows of every domain.

        Args:
            index: which parameter.
            outputs: what :meth:`outputs` gave, shape ``(rows, length, a)``.
            inputs: what :meth:`inputs` gave, shape ``(rows, length, b)``.
        """

    @abstractmethod
    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        """Sums of the same batch beside these, to compare with gradients.

        Returns:
            Empty sums that take what these keep of a layer, and their projections.
        """

    @abstractmethod
    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        """Add the gradients of rows of a table.

        Args:
            index: which parameter.
            looked_up: numbers of rows, shape ``(rows, length)``; -1 for none.
            gradients: of what was looked up, shape ``(rows, length, inputs)``.
        """

    @abstractmethod
    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector, such as a bias.

        Args:
            index: which parameter.
            gradients: shape ``(rows, length, n)``.
        """

    @abstractmethod
    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add a domain's gradient of a parameter as it is.

        Args:
            index: which parameter.
            domain: whose.
            gradient: of the parameter's shape.
        """


class DenseAccumulator(GradientAccumulator):
    """Sums whose linear layers compute the gradient of each domain on the way to the whole one."""

    @abstractmethod
    def add_whole_products(self, index: int, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Add ``dY^T X`` over the rows of every domain, and give their sum.

        Args:
            index: which parameter.
            outputs: dY, shape ``(rows, length, a)``.
            inputs: X, shape ``(rows, length, b)``.

        Returns:
            The gradient of all rows, shape ``(a, b)``.
        """


@final
class ProjectedAccumulator(GradientAccumulator):
    """Projected gradients, one row of numbers per domain.

    Args:
        projections: of the parameters.
        segments: which rows belong to which domain.
        rows: where they are added up, shape ``(m, size)``; by default new zeros.
        late: project when gradients are added, not before.
    """

    def __init__(
        self, projections: Projections, segments: RowGroups, *, rows: Tensor | None = None, late: bool = False
    ) -> None:
        super().__init__(segments)
        self._projections, self._late = projections, late
        self.rows = projections.empty_rows(len(segments.counts)) if rows is None else rows
        """Shape ``(m, size)``."""
        self._blocks: dict[int, Tensor] = {}

    def _block(self, index: int) -> Tensor:
        """The part of a parameter, shape ``(m, r, r)``."""
        block = self._blocks.get(index)
        if block is None:
            block = self._blocks[index] = self._projections.block(self.rows, index)
        return block

    def inputs(self, index: int, values: Tensor) -> Tensor:
        """``X A``.

        Args:
            index: which parameter.
            values: X.

        Returns:
            Shape ``(..., r)``.
        """
        return values if self._late else self._projections.each[index].project_inputs(values)

    def outputs(self, index: int, values: Tensor) -> Tensor:
        """``dY B``.

        Args:
            index: which parameter.
            values: dY.

        Returns:
            Shape ``(..., r)``.
        """
        return values if self._late else self._projections.each[index].project_outputs(values)

    def input_matrix(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """A.

        Args:
            index: which parameter.
            dtype: that is wanted.

        Returns:
            Shape ``(inputs, r)``, ``None`` for the identity.
        """
        return None if self._late else self._projections.each[index].side("inputs", dtype)

    def checking(self) -> tuple[ProjectedAccumulator, Projections]:
        """Empty sums with the same projections.

        Returns:
            The sums and their projections.
        """
        return ProjectedAccumulator(self._projections, self.segments, late=self._late), self._projections

    def add_products(self, index: int, outputs: Tensor, inputs: Tensor) -> None:
        """Add ``(dY B)^T (X A)``.

        Args:
            index: which parameter.
            outputs: ``dY B``.
            inputs: ``X A``.
        """
        if index in self.ignored:
            return
        if self._late:
            projection = self._projections.each[index]
            outputs, inputs = projection.project_outputs(outputs), projection.project_inputs(inputs)
        self.segments.add_products(self._block(index), outputs, inputs)

    def add_lookups(self, index: int, looked_up: Tensor, gradients: Tensor) -> None:
        """Add ``B[looked_up]^T (dY A)``: the inputs of an embedding are one-hot, so rows of B stand for them.

        Args:
            index: which parameter.
            looked_up: numbers of rows; -1 for none.
            gradients: dY.
        """
        if index in self.ignored:
            return
        projection = self._projections.each[index]
        table = projection.side("outputs", projection.dtype)
        if table is None:
            table = torch.eye(projection.outputs, dtype=projection.dtype, device=gradients.device)
        chosen = functional.embedding(looked_up.clamp_min(0), table)
        chosen = chosen.masked_fill((looked_up < 0).unsqueeze(-1), 0.0)
        projected = projection.project_inputs(gradients)
        self.segments.add_products(self._block(index), chosen, projected)

    def add_vectors(self, index: int, gradients: Tensor) -> None:
        """Add the gradients of a vector, which are not projected.

        Args:
            index: which parameter.
            gradients: shape ``(rows, length, n)``.
        """
        if index not in self.ignored:
            self.segments.add_sums(self._block(index).flatten(1), gradients)

    def add_gradient(self, index: int, domain: int, gradient: Tensor) -> None:
        """Add ``B^T G A``.

        Args:
            index: which parameter.
            domain: whose.
            gradient: G.
        """
        self._block(index)[domain].add_(self._projections.each[index].project(gradient))
