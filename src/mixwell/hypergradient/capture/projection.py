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

A projected gradient cannot be multiplied by an elementwise preconditioner P (Adam's), but by one of rank one:
where ``P ~ r c^T``, the projections ``diag(r) B`` and ``diag(c) A`` give that of ``r c^T * G`` at no cost per row.
What is left, ``P / (r c^T)``, hardly changes over a round and is applied at its end, to the validation gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor


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
        across = {"outputs": self.shape[1], "inputs": self.shape[0]}
        self.sketches = {
            side: whole.new_zeros(len(whole), across[side]) for side, whole in self._matrices.items()
        }
        """The products of a sum of matrices with the projection of the other side, by side."""
        self.sketched = False
        """Whether the sketches are of anything."""
        self.scales: tuple[Tensor, ...] = ()
        """r and c; for a gradient that is not projected P itself; none where a gradient is not preconditioned."""
        self._scaled: dict[str, Tensor] = {}
        self._copies: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def exact(self) -> bool:
        """Whether neither side is projected."""
        return not self._matrices

    @property
    def mutes(self) -> bool:
        """Whether the scales make every gradient zero."""
        return bool(self.scales) and not bool(self.scales[0].any())

    def precondition(self, scales: tuple[Tensor, ...]) -> None:
        """Take new values of :attr:`scales`."""
        self._copies = {}
        if not self.scales:
            self.scales = tuple(one.clone() for one in scales)
            self._scaled = {side: torch.empty_like(matrix) for side, matrix in self._matrices.items()}
        for kept, given in zip(self.scales, scales, strict=True):
            kept.copy_(given)
        self._scale()

    def _scale(self) -> None:
        for place, side in enumerate(("outputs", "inputs")):
            if side in self._scaled:
                scale = self.scales[place].unsqueeze(1)
                torch.mul(self._matrices[side], scale, out=self._scaled[side])

    @property
    def factor(self) -> Tensor | None:
        """The factors of a projected gradient, of shape :attr:`shape`, that its projection does not contain.

        Those of sides that are not projected.
        """
        if not self.scales:
            return None
        if self.exact:
            return self.scales[0].view(self.shape)
        rows, columns = (
            scale if length == r else scale.new_ones(r)
            for scale, length, r in zip(self.scales, (self.outputs, self.inputs), self.shape, strict=True)
        )
        return torch.outer(rows, columns)

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

    def align(self, gradient: Tensor) -> None:
        """Keep the leading directions of a gradient exactly."""
        self.aligned = False
        if not self.alignable:
            return
        matrix = self.as_matrix(gradient).to(self.dtype)
        # Subspace iteration: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011). Few iterations
        # suffice, because any directions leave the estimate unbiased.
        columns = max(basis.shape[1] for basis in self._bases.values())
        # A fixed seed: these directions must be the same on every process and after resuming.
        start = random_signs((self.inputs, columns), random_stream(0), dtype=self.dtype).to(self._device)
        image = matrix @ (matrix.t() @ torch.linalg.qr(matrix @ start).Q)
        size = float(image.norm())
        if not (size > 0 and math.isfinite(size)):
            return
        left = torch.linalg.qr(image).Q
        found = {"outputs": left, "inputs": torch.linalg.qr(matrix.t() @ left).Q}
        for side, basis in self._bases.items():
            basis.copy_(found[side][:, : basis.shape[1]])
        self.aligned = True

    def align_to_sketches(self) -> None:
        """Keep the leading directions of the sum of matrices that was sketched exactly, and forget it.

        ``E (S A) (S A)^T = S S^T`` for the sum S, so the leading left singular vectors of ``S A`` are near its.
        """
        self.aligned = False
        if not self.sketched:
            return
        self.sketched = False
        for side, basis in self._bases.items():
            sketch = self.sketches[side]
            size = float(sketch.norm())
            if basis.numel() and size > 0 and math.isfinite(size):
                basis.copy_(torch.linalg.svd(sketch, full_matrices=False).U[:, : basis.shape[1]])
                self.aligned = True
            else:
                basis.zero_()
            sketch.zero_()

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
        self._scale()

    def as_matrix(self, gradient: Tensor) -> Tensor:
        """Return a gradient as a matrix, shape ``(outputs, inputs)``."""
        return gradient.detach().reshape(self.outputs, self.inputs)

    def matrix(self, side: str, dtype: torch.dtype) -> Tensor | None:
        """Return A (for ``"inputs"``) or B (``"outputs"``), with r or c; ``None`` for a side not projected."""
        found = self._scaled.get(side, self._matrices.get(side))
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
        """Return ``B^T (r c^T * G) A`` in float32 or better, of shape :attr:`shape`, without :attr:`factor`."""
        matrix = self.as_matrix(gradient)
        return self.project_outputs(self.project_inputs(matrix).to(self.dtype).t()).t()

    def project_vector(self, matrix: Tensor, *, sketch: bool = False) -> Tensor:
        """Return ``B^T V A``, without r and c, of a matrix V.

        Args:
            sketch: whether to add ``V A`` and ``V^T B`` to the sketches of a sum of matrices.
        """
        inputs, outputs = self._matrices.get("inputs"), self._matrices.get("outputs")
        matrix = matrix.to(self.dtype)
        product = matrix if inputs is None else matrix @ inputs
        if sketch:
            self.sketched = True
            if outputs is not None:
                self.sketches["outputs"].add_(product)
            if inputs is not None:
                transposed = matrix.t()
                self.sketches["inputs"].add_(transposed if outputs is None else transposed @ outputs)
        return product if outputs is None else outputs.t() @ product

    @property
    def nbytes(self) -> int:
        """The memory of A and B."""
        own = (self._matrices, self._scaled, self.sketches, self._copies)
        held = (*self.scales, *(one for found in own for one in found.values()))
        return sum(one.nbytes for one in held)


def unscaled(matrix: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
    """Return ``V / (r c^T)``, zero where r or c is.

    Args:
        scales: r and c; without any, V is returned.
    """
    if not scales:
        return matrix
    rows, columns = (torch.where(one > 0, one, torch.inf) for one in scales)
    return matrix / rows.unsqueeze(1) / columns
