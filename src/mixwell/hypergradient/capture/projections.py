"""Random projections of gradients that keep inner products: an m x d trace becomes m x r x r per layer.

For a linear layer with inputs X and output gradients dY (a row per sample) the gradient of the weights is
``G = dY^T X``. With random A and B, whose entries are independent signs over ``sqrt(r)``,

    ``B^T G A = (dY B)^T (X A)``   and   ``E <B^T G A, B^T V A> = <G, V>``

so neither G nor that of any domain is ever formed (the idea is known from influence functions: Park et
al., "TRAK" (2023); Choe et al., "What is your data worth to GPT?" (LoGra, 2024)).

Gradients are nearly of low rank, and then a few directions make most of the error: for one of rank one the
standard deviation of the inner product is ``2 |G| |V| / sqrt(r)``. But V is the validation gradient, whose leading
directions hardly change from one round to the next. So half of the columns of A are an orthonormal basis Q of the
leading directions of the last validation gradient, and the rest ``(I - Q Q^T) S`` with random signs S: the part
in these directions is exact, only the rest is random, and the expectation is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters


def random_stream(*key: int) -> torch.Generator:
    """Return a generator on the CPU for a key, such as seed and round; the same on every machine."""
    mixed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> 1))


def random_signs(shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype) -> Tensor:
    """Return independent signs, a tensor of +1 and -1 on the CPU."""
    return torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(dtype)


@final
class Projection:
    """``B^T G A`` for the gradient G of one parameter, seen as a matrix: its first dimension by all others.

    A side that is no longer than the rank r is not projected, nor is a vector.
    """

    def __init__(self, parameter: Tensor, rank: int) -> None:
        flat = parameter.dim() < 2
        self.outputs = 1 if flat else parameter.shape[0]
        self.inputs = parameter.numel() // max(self.outputs, 1)
        self.shape = (min(self.outputs, rank), self.inputs if flat else min(self.inputs, rank))
        """The shape of the projected gradient."""
        # Sums over many tokens and steps, which half precision would round away.
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._device = parameter.device
        lengths = {"outputs": (self.outputs, self.shape[0]), "inputs": (self.inputs, self.shape[1])}
        self._matrices = {
            side: torch.zeros(length, r, dtype=self.dtype, device=self._device)
            for side, (length, r) in lengths.items()
            if length > r
        }
        most = min(self.outputs, self.inputs)
        # Views of half of the columns. The other half stay random, for the part outside of these directions.
        self._bases = {
            side: whole[:, : min(whole.shape[1] // 2, most)] for side, whole in self._matrices.items()
        }
        self.aligned = False
        """Whether some columns are exact."""
        self._copies: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def alignable(self) -> bool:
        """Whether there is a column that could be exact."""
        return any(basis.numel() for basis in self._bases.values())

    @property
    def bases(self) -> dict[str, Tensor]:
        """A copy of Q by side, the columns that are exact; zeros where all are random."""
        return {
            side: basis.clone(memory_format=torch.contiguous_format)
            if self.aligned
            else basis.new_zeros(basis.shape)
            for side, basis in self._bases.items()
        }

    @bases.setter
    def bases(self, bases: Mapping[str, Tensor]) -> None:
        self.aligned = any(bool(basis.any()) for basis in bases.values())
        for side, basis in bases.items():
            self._bases[side].copy_(basis)

    def align(self, gradient: Tensor | None) -> None:
        """Keep the leading directions of a gradient exactly; none for ``None``."""
        warm, self.aligned = self.aligned, False
        if gradient is None or not self.alignable:
            return
        matrix = gradient.detach().reshape(self.outputs, self.inputs).to(self.dtype)
        # Subspace iteration: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011). Few iterations
        # suffice, because any directions leave the estimate unbiased; those of the last round are a good start.
        start = self._bases.get("inputs")
        if start is None or not warm:
            columns = max(basis.shape[1] for basis in self._bases.values())
            # A fixed seed: these directions must be the same on every process and after resuming.
            start = random_signs((self.inputs, columns), random_stream(0), dtype=self.dtype)
            start = start.to(self._device)
            start = matrix.t() @ torch.linalg.qr(matrix @ start).Q
        image = matrix @ start
        size = float(image.norm())
        if not (size > 0 and math.isfinite(size)):
            return
        left = torch.linalg.qr(image).Q
        found = {"outputs": left, "inputs": torch.linalg.qr(matrix.t() @ left).Q}
        for side, basis in self._bases.items():
            basis.copy_(found[side][:, : basis.shape[1]])
        self.aligned = True

    def resample(self, generator: torch.Generator) -> None:
        """Draw new random columns of A and B."""
        self._copies = {}
        for side, whole in self._matrices.items():
            if self._device.type == "meta":  # where memory is only counted
                continue
            basis = self._bases[side]
            drawn = whole[:, basis.shape[1] :] if self.aligned else whole
            drawn.copy_(random_signs(drawn.shape, generator, dtype=torch.int8))
            drawn.mul_(1 / math.sqrt(drawn.shape[1]))
            if self.aligned:  # (I - Q Q^T) S: the exact directions must not be counted again
                drawn.addmm_(basis, basis.t() @ drawn, alpha=-1.0)

    def matrix(self, side: str, dtype: torch.dtype) -> Tensor | None:
        """Return A (for ``"inputs"``) or B (``"outputs"``), ``None`` where that side is not projected."""
        found = self._matrices.get(side)
        if found is None or dtype == self.dtype:
            return found
        # Under autocast every batch wants a copy in half precision.
        if (side, dtype) not in self._copies:
            self._copies[side, dtype] = found.to(dtype)
        return self._copies[side, dtype]

    def project_inputs(self, values: Tensor) -> Tensor:
        """Return ``X A``, from shape ``(..., inputs)`` to ``(..., r)``."""
        matrix = self.matrix("inputs", values.dtype)
        return values if matrix is None else values @ matrix

    def project_outputs(self, values: Tensor) -> Tensor:
        """Return ``dY B``, from shape ``(..., outputs)`` to ``(..., r)``."""
        matrix = self.matrix("outputs", values.dtype)
        return values if matrix is None else values @ matrix

    def project(self, gradient: Tensor) -> Tensor:
        """Return ``B^T G A`` in float32 or better, of shape :attr:`shape`."""
        matrix = gradient.detach().reshape(self.outputs, self.inputs)
        return self.project_outputs(self.project_inputs(matrix).to(self.dtype).t()).t()

    @property
    def nbytes(self) -> int:
        """The memory of A and B."""
        return sum(one.nbytes for one in (*self._matrices.values(), *self._copies.values()))


@final
class Projections:
    """The projections of all parameters, one after the other in a row of ``size`` numbers."""

    def __init__(self, parameters: Parameters, rank: int, seed: int) -> None:
        self._seed = seed
        self.each = [Projection(p, rank) for p in parameters.tensors]
        """The projection of each parameter."""
        sizes = [one.shape[0] * one.shape[1] for one in self.each]
        ends = np.cumsum(sizes).tolist()
        self.slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        """The position of each parameter's projection in a row."""
        self.size: int = ends[-1]
        """The length of a row."""
        self.device = parameters.tensors[0].device
        self.dtype = max((one.dtype for one in self.each), key=lambda kind: torch.finfo(kind).bits)

    def align(self, gradients: Iterable[Tensor | None]) -> None:
        """Keep the leading directions of the gradients exactly, one gradient per parameter."""
        for one, gradient in zip(self.each, gradients, strict=True):
            one.align(None if gradient is None else distributed.full_tensor(gradient))

    def resample(self, round_index: int) -> None:
        """Draw the random matrices of a round."""
        generator = random_stream(self._seed, round_index)
        for one in self.each:
            one.resample(generator)

    def empty_rows(self, count: int) -> Tensor:
        """Return zeros of shape ``(count, size)``."""
        return torch.zeros(count, self.size, dtype=self.dtype, device=self.device)

    def block(self, rows: Tensor, index: int) -> Tensor:
        """Return a view of a parameter's part, from shape ``(n, size)`` to ``(n, r, r)``."""
        return rows[:, self.slices[index]].view(len(rows), *self.each[index].shape)

    def project(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """Return the row, shape ``(size,)``, of one gradient per parameter, ``None`` for zero."""
        row = self.empty_rows(1)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.block(row, index)[0].copy_(self.each[index].project(distributed.full_tensor(gradient)))
        return row[0]

    @property
    def unaligned(self) -> bool:
        """Whether there are directions to choose, and none are chosen."""
        return any(one.alignable for one in self.each) and not any(one.aligned for one in self.each)

    @property
    def nbytes(self) -> int:
        """The memory of all random matrices."""
        return sum(one.nbytes for one in self.each)
