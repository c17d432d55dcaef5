"""Random projections of gradients that keep inner products: an m x d trace becomes m x r x r per layer.

For a linear layer with inputs X and output gradients dY (a row per sample) the gradient of the weights is
``G = dY^T X``. With random A and B, whose entries are independent signs over ``sqrt(r)``,

    ``B^T G A = (dY B)^T (X A)``   and   ``E <B^T G A, B^T V A> = <G, V>``

so neither G nor that of any domain need ever be formed (the idea is known from influence functions: Park et
al., "TRAK" (2023); Choe et al., "What is your data worth to GPT?" (LoGra, 2024)).

Gradients are nearly of low rank, and then a few directions make most of the error: for one of rank one the
standard deviation of the inner product is ``2 |G| |V| / sqrt(r)``. But V is the validation gradient, whose leading
directions hardly change from one round to the next. So half of the columns of A are an orthonormal basis Q of the
leading directions of the last validation gradient, and the rest ``(I - Q Q^T) S`` with random signs S: what lies
in these directions is exact, only what lies outside is random, and the expectation is the same.
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
    """Random numbers of their own for every key, the same on every machine.

    Args:
        key: whole numbers, such as seed and round.

    Returns:
        A generator on the CPU.
    """
    mixed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> 1))


def random_signs(shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype) -> Tensor:
    """Independent signs.

    Args:
        shape: of the result.
        generator: where they come from.
        dtype: of the result.

    Returns:
        A tensor of +1 and -1 on the CPU.
    """
    return torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(dtype)


@final
class Projection:
    """``B^T G A`` for the gradient G of one parameter, seen as a matrix: its first dimension by all others.

    A side that is no longer than the rank is left as it is, and so is a vector.

    Args:
        parameter: whose gradients are projected.
        rank: r.
    """

    def __init__(self, parameter: Tensor, rank: int) -> None:
        flat = parameter.dim() < 2
        self.outputs = 1 if flat else parameter.shape[0]
        self.inputs = parameter.numel() // max(self.outputs, 1)
        self.shape = (min(self.outputs, rank), self.inputs if flat else min(self.inputs, rank))
        """Of the projected gradient."""
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._device = parameter.device
        lengths = {"outputs": (self.outputs, self.shape[0]), "inputs": (self.inputs, self.shape[1])}
        self._sides = {
            side: torch.zeros(length, r, dtype=self.dtype, device=self._device)
            for side, (length, r) in lengths.items()
            if length > r
        }
        most = min(self.outputs, self.inputs)
        self._bases = {
            side: whole[:, : min(whole.shape[1] // 2, most)] for side, whole in self._sides.items()
        }
        self.aligned = False
        """Whether some columns are exact."""
        self._copies: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def aimable(self) -> bool:
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
        """Choose the directions that are kept exactly.

        Args:
            gradient: whose leading directions they are, of the parameter's shape; ``None`` for none.
        """
        warm, self.aligned = self.aligned, False
        if gradient is None or not self.aimable:
            return
        matrix = gradient.detach().reshape(self.outputs, self.inputs).to(self.dtype)
        # Subspace iteration: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011). The directions
        # of the last round are a good start.
        start = self._bases.get("inputs")
        if start is None or not warm:
            columns = max(basis.shape[1] for basis in self._bases.values())
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

    def draw(self, generator: torch.Generator) -> None:
        """Take new random columns of A and B.

        Args:
            generator: where they come from.
        """
        self._copies = {}
        for side, whole in self._sides.items():
            if self._device.type == "meta":  # where memory is only counted
                continue
            basis = self._bases[side]
            drawn = whole[:, basis.shape[1] :] if self.aligned else whole
            drawn.copy_(random_signs(drawn.shape, generator, dtype=torch.int8))
            drawn.mul_(1 / math.sqrt(drawn.shape[1]))
            if self.aligned:
                drawn.addmm_(basis, basis.t() @ drawn, alpha=-1.0)

    def side(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A or B.

        Args:
            name: ``"inputs"`` for A, ``"outputs"`` for B.
            dtype: that is wanted (a copy in it is kept).

        Returns:
            Shape ``(length, r)``, or ``None`` where that side is not projected.
        """
        own = self._sides.get(name)
        if own is None or dtype == self.dtype:
            return own
        if (name, dtype) not in self._copies:
            self._copies[name, dtype] = own.to(dtype)
        return self._copies[name, dtype]

    def project_inputs(self, values: Tensor) -> Tensor:
        """``X A``.

        Args:
            values: shape ``(..., inputs)``.

        Returns:
            Shape ``(..., r)``.
        """
        side = self.side("inputs", values.dtype)
        return values if side is None else values @ side

    def project_outputs(self, values: Tensor) -> Tensor:
        """``dY B``.

        Args:
            values: shape ``(..., outputs)``.

        Returns:
            Shape ``(..., r)``.
        """
        side = self.side("outputs", values.dtype)
        return values if side is None else values @ side

    def project(self, gradient: Tensor) -> Tensor:
        """``B^T G A``.

        Args:
            gradient: of the parameter's shape.

        Returns:
            Shape :attr:`shape`, in float32 or better.
        """
        matrix = gradient.detach().reshape(self.outputs, self.inputs)
        return self.project_outputs(self.project_inputs(matrix).to(self.dtype).t()).t()

    @property
    def nbytes(self) -> int:
        """The memory of A and B."""
        return sum(one.nbytes for one in (*self._sides.values(), *self._copies.values()))


@final
class Projections:
    """The projections of all parameters, one after the other in a row of ``size`` numbers.

    Args:
        parameters: whose gradients are projected.
        rank: r.
        seed: of the random matrices.
    """

    def __init__(self, parameters: Parameters, rank: int, seed: int) -> None:
        self._seed = seed
        self.each = [Projection(p, rank) for p in parameters.tensors]
        """The projection of each parameter."""
        sizes = [one.shape[0] * one.shape[1] for one in self.each]
        ends = np.cumsum(sizes).tolist()
        self.places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        """Where the projection of each parameter is in a row."""
        self.size: int = ends[-1]
        """The length of a row."""
        self.device = parameters.tensors[0].device
        self.dtype = max((one.dtype for one in self.each), key=lambda kind: torch.finfo(kind).bits)

    def align(self, gradients: Iterable[Tensor | None]) -> None:
        """Choose the directions that are kept exactly.

        Args:
            gradients: one per parameter, whose leading directions they are.
        """
        for one, gradient in zip(self.each, gradients, strict=True):
            one.align(None if gradient is None else distributed.full_tensor(gradient))

    def draw(self, round_index: int) -> None:
        """Take new random matrices.

        Args:
            round_index: the number of the round.
        """
        generator = random_stream(self._seed, round_index)
        for one in self.each:
            one.draw(generator)

    def empty_rows(self, count: int) -> Tensor:
        """Zeros.

        Args:
            count: how many rows.

        Returns:
            Shape ``(count, size)``.
        """
        return torch.zeros(count, self.size, dtype=self.dtype, device=self.device)

    def block(self, rows: Tensor, index: int) -> Tensor:
        """The part of a parameter.

        Args:
            rows: shape ``(n, size)``.
            index: which parameter.

        Returns:
            A view of shape ``(n, r, r)``.
        """
        return rows[:, self.places[index]].view(len(rows), *self.each[index].shape)

    def project(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """One row for gradients of all parameters.

        Args:
            gradients: one per parameter, ``None`` for zero.

        Returns:
            Shape ``(size,)``.
        """
        row = self.empty_rows(1)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.block(row, index)[0].copy_(self.each[index].project(distributed.full_tensor(gradient)))
        return row[0]

    @property
    def unaligned(self) -> bool:
        """Whether there are directions to choose, and none are chosen."""
        return any(one.aimable for one in self.each) and not any(one.aligned for one in self.each)

    @property
    def nbytes(self) -> int:
        """The memory of all random matrices."""
        return sum(one.nbytes for one in self.each)
