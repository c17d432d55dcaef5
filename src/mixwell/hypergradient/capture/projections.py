"""The projections of all parameters, one after the other in a row of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.capture.projection import Projection, random_stream
from mixwell.hypergradient.parameters import Parameters


@final
class Projections:
    """The projections of all parameters, one after the other in a row of ``size`` numbers."""

    def __init__(self, parameters: Parameters, rank: int, seed: int, *, preconditioned: bool = False) -> None:
        self._seed = seed
        self.each = [Projection(p, rank) for p in parameters.tensors]
        """The projection of each parameter."""
        # Vectors are not projected, so that it does not matter in which group of an optimizer they are.
        self._keys = list(accumulate((not one.exact for one in self.each), initial=0))
        sizes = [one.shape[0] * one.shape[1] for one in self.each]
        ends = np.cumsum(sizes).tolist()
        self.slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        """The position of each parameter's projection in a row."""
        self.size: int = ends[-1]
        """The length of a row."""
        self.device = parameters.tensors[0].device
        self.dtype = max((one.dtype for one in self.each), key=lambda kind: torch.finfo(kind).bits)
        self.factors: Tensor | None = None
        """The factors of a row, shape ``(size,)``, that :meth:`project` leaves out; ``None`` for ones."""
        if preconditioned:
            self.factors = torch.ones(self.size, dtype=self.dtype, device=self.device)
            for one in self.each:
                lengths = [one.outputs * one.inputs] if one.exact else [one.outputs, one.inputs]
                one.precondition(tuple(self.factors.new_ones(n, dtype=one.dtype) for n in lengths))

    def precondition(self, index: int, scales: tuple[Tensor, ...]) -> None:
        """Take new scales of a parameter."""
        one = self.each[index]
        one.precondition(scales)
        if self.factors is not None and one.factor is not None:
            self.factors[self.slices[index]] = one.factor.flatten().to(self.dtype)

    @cached_property
    def owners(self) -> Tensor:
        """The index of the parameter that each number of a row is of, shape ``(size,)``."""
        sizes = torch.tensor([columns.stop - columns.start for columns in self.slices])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)

    def align_to_sketches(self) -> None:
        """Keep the leading directions of the sum of the vectors since the last call exactly."""
        for one in self.each:
            one.align_to_sketches()

    def resample(self, round_index: int, indices: Iterable[int] | None = None) -> None:
        """Draw the random matrices of a round, of some of the parameters or all."""
        for index in range(len(self.each)) if indices is None else indices:
            self.each[index].resample(random_stream(self._seed, round_index, self._keys[index]))

    def empty_rows(self, count: int) -> Tensor:
        """Return zeros of shape ``(count, size)``."""
        return torch.zeros(count, self.size, dtype=self.dtype, device=self.device)

    def block(self, rows: Tensor, index: int) -> Tensor:
        """Return a view of a parameter's part, from shape ``(n, size)`` to ``(n, r, r)``."""
        return rows[:, self.slices[index]].view(len(rows), *self.each[index].shape)

    def project(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """Return the row, shape ``(size,)``, of one gradient per parameter, ``None`` for zero."""
        return self._row(gradients, lambda one, gradient: one.project(gradient))

    def project_vectors(self, vectors: Iterable[Tensor | None]) -> Tensor:
        """Return the row of one matrix ``B^T V A`` per parameter, without r and c, and sketch the vectors."""
        return self._row(vectors, lambda one, vector: one.project_vector(one.as_matrix(vector), sketch=True))

    def state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the exact directions, the sketches and the scales; the rest follows from seed and round."""
        found: dict[str, Tensor] = {}
        for name, one in zip(names, self.each, strict=True):
            found |= {f"{name}.{side}": basis for side, basis in one.bases.items()}
            found |= {f"{name}.sketch.{side}": sketch for side, sketch in one.sketches.items()}
            found |= {f"{name}.scale.{place}": scale for place, scale in enumerate(one.scales)}
        return found

    def load_state(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state`; :meth:`resample` then draws the random columns."""
        for index, (name, one) in enumerate(zip(names, self.each, strict=True)):
            one.bases = {side: tensors[f"{name}.{side}"] for side in one.bases}
            for side, sketch in one.sketches.items():
                sketch.copy_(tensors[f"{name}.sketch.{side}"])
                one.sketched |= bool(sketch.any())
            if one.scales:
                self.precondition(index, tuple(tensors[f"{name}.scale.{k}"] for k in range(len(one.scales))))

    def _row(
        self, gradients: Iterable[Tensor | None], project: Callable[[Projection, Tensor], Tensor]
    ) -> Tensor:
        row = self.empty_rows(1)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                found = project(self.each[index], distributed.full_tensor(gradient))
                self.block(row, index)[0].copy_(found)
        return row[0]

    @property
    def nbytes(self) -> int:
        """The memory of all random matrices."""
        return sum(one.nbytes for one in self.each)
