"""The derivative of clipping by norm, for traces that take gradients before the combined one is known.

With ``G = sum_j w_j g_j`` and ``c = C / (|G| + 1e-6) < 1`` the optimizer receives ``c G``, and (without curvature)

    ``d (c G) / d w_j = c (g_j - a_j G)``,   ``a_j = <G, g_j> / (|G| (|G| + 1e-6))``:

a domain cannot make the step longer, it can only turn it.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.capture.projection import random_signs, random_stream
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import Combined
from mixwell.hypergradient.traces.count_sketch import fold_into, prime_below
from mixwell.typing import Gradients, Vector

SIZE = 1 << 18
"""Numbers per domain. Gradients of no more elements are kept exactly."""

# The period of the table of signs, another prime: the signs of two elements of one bucket are independent unless
# the elements are a multiple of both primes apart, which is more than 10^11.
_PERIOD = prime_below(1 << 20)


@final
class GradientSketches:
    """The gradients of one step's domains, sketched to the numbers that ``<G, g_j>`` requires.

    G is known after all gradients, which are not kept. Element i of a gradient is multiplied by a random sign and
    added to bucket ``i mod s``, as in :class:`mixwell.SketchedTraces`, so ``<S G, S g_j>`` has the standard
    deviation ``sqrt(2 / s) |G| |g_j|``, 0.3% of ``|G| |g_j|``, and is exact for models of up to s elements.
    Nothing is sketched where gradients are not clipped.
    """

    def __init__(self, parameters: Parameters, domains: int) -> None:
        self._parameters = parameters
        self._domains = domains
        counts = [distributed.to_local(p).numel() for p in parameters.tensors]
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]
        self._rows: Tensor | None = None
        self._signs: Tensor | None = None
        self._active = True

    def clear(self) -> None:
        """Begin a step."""
        if self._rows is not None:
            self._rows.zero_()

    def add(self, domain: int, index: int, gradient: Tensor, scale: float, rows: slice | None = None) -> None:
        """Add ``scale * g_j`` of one parameter, or some of its rows."""
        if not self._active:
            return
        if self._rows is None:
            self._allocate()
        assert self._rows is not None
        start = self._starts[index]
        if rows is not None:
            start += rows.start * self._parameters.tensors[index][0].numel()
        self._sketch_into(self._rows[domain], gradient, start, scale)

    def coefficients(self, combined: Combined, gradients: Gradients) -> list[float] | None:
        """Return ``a_j / c`` for every domain, the factors of the clipped gradient; ``None`` without clipping.

        With sharded parameters all processes must call it. Otherwise each process has those of its own rows, and
        the mean of its traces over the processes is the trace of all rows.

        Args:
            gradients: the combined gradient of the traced parameters.
        """
        # Without clipping the norm is not computed, and no sketch of the next steps is needed.
        self._active = combined.norm is not None
        if not self._active:
            self._rows = None
        if not combined.clipped or self._rows is None:
            return None
        whole = self._sketch(gradients, [1.0] * len(gradients))
        if not self._parameters.sharded:
            products = (self._rows @ whole).double().cpu().numpy()
            return clipping_coefficients(combined, products, float(whole @ whole))
        # A shard that several processes hold counts once.
        shares = [distributed.replication_weight(p) for p in self._parameters.tensors]
        rows = torch.cat([self._rows, whole.unsqueeze(0)])
        local = (rows @ self._sketch(gradients, shares)).double().cpu().numpy()
        products = distributed.all_reduce_sum(local, self._parameters.device)
        return clipping_coefficients(combined, products[:-1], float(products[-1]))

    def _sketch(self, gradients: Gradients, factors: list[float]) -> Tensor:
        assert self._rows is not None
        target = torch.zeros_like(self._rows[0])
        for gradient, start, factor in zip(gradients, self._starts[:-1], factors, strict=True):
            if gradient is not None:
                self._sketch_into(target, gradient, start, factor)
        return target

    @property
    def nbytes(self) -> int:
        """The memory of the sketches and of the table of signs."""
        return sum(one.nbytes for one in (self._rows, self._signs) if one is not None)

    def _allocate(self) -> None:
        first = self._parameters.tensors[0]
        size = _sketch_size(self._starts[-1])
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._rows = torch.zeros(self._domains, max(1, size), dtype=dtype, device=first.device)
        if self._signs is None and size < self._starts[-1]:
            drawn = random_signs((_PERIOD,), random_stream(0), dtype=torch.int8).to(first.device)
            # Twice, so that every window of one period is contiguous.
            self._signs = torch.cat([drawn, drawn])

    def _sketch_into(self, target: Tensor, gradient: Tensor, start: int, factor: float) -> None:
        flat = distributed.to_local(gradient.detach()).flatten()
        for piece in flat.split(_PERIOD):
            values = piece.to(device=target.device, dtype=target.dtype)
            if self._signs is not None:
                offset = start % _PERIOD
                values = values * self._signs[offset : offset + len(values)]
            fold_into(target, values, start, factor)
            start += len(piece)


def sketch_bytes(parameters: int, domains: int) -> int:
    """Return the memory of :class:`GradientSketches` of a model with this number of parameters, in float32."""
    size = _sketch_size(parameters)
    return 4 * max(1, size) * domains + (2 * _PERIOD if size < parameters else 0)


def _sketch_size(parameters: int) -> int:
    return min(prime_below(SIZE), parameters)


def clipping_coefficients(combined: Combined, products: Vector, square: float) -> list[float] | None:
    """Return ``a_j / c``, the factors of the clipped gradient, from estimates of ``<cG, g_j>`` and ``<cG, cG>``.

    The ratio of two estimates from one sketch is more exact than one over the known norm: ``sum_j w_j a_j = 1``
    holds for it exactly, as it does for ``G = sum_j w_j g_j``.

    Args:
        products: ``<cG, g_j>`` of every domain, shape ``(m,)``.
        square: ``<cG, cG>``.
    """
    if not (combined.clipped and square > 0):
        return None
    assert combined.norm is not None
    # 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    return (products / square * (combined.norm / (combined.norm + 1e-6))).tolist()


def coefficients_on_device(combined: Combined, products: Tensor, square: Tensor) -> Tensor:
    """Return the same as :func:`clipping_coefficients` without waiting for the device: zeros without clipping."""
    assert combined.clip_on_device is not None
    assert combined.norm_on_device is not None
    norm = combined.norm_on_device
    found = products / square * (norm / (norm + 1e-6))
    return torch.where((combined.clip_on_device < 1) & (square > 0), found, 0.0)


def products_by_parameter(rows: Tensor, row: Tensor, owners: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``<G, g_j>`` of every domain and ``<G, G>`` from projections of ``P G`` and ``P g_j``.

    ``<G, g_j>_p`` is taken as ``|G|_p^2 <P G, P g_j>_p / |P G|_p^2`` for every parameter p. The sum over the
    domains is right, and nothing is divided by P, which would magnify the error of the projections.

    Args:
        rows: those of ``P g_j``, shape ``(m, size)``.
        row: that of ``P G``, shape ``(size,)``.
        owners: the parameter of every number of a row, shape ``(size,)``.
        norms: ``|G|_p`` of every parameter.
    """
    sizes = row.new_zeros(len(norms)).index_add_(0, owners, row * row)
    products = row.new_zeros(len(rows), len(norms)).index_add_(1, owners, rows * row)
    shares = torch.where(sizes > 0, products / sizes, 1.0)
    squares = norms.square()
    return shares @ squares, squares.sum()
