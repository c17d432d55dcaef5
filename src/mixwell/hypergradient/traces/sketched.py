"""Traces of a given size, whatever the model's: ``S z_j`` with a random linear map S."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.capture.projection import random_signs, random_stream
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import TRACES, Combined, StepModel, Traces, TracesConfig
from mixwell.hypergradient.traces.clipping import GradientSketches, sketch_bytes
from mixwell.hypergradient.traces.count_sketch import fold_into, prime_below
from mixwell.hypergradient.traces.dense import SMALLEST_SCALE
from mixwell.typing import Gradients, Json, Vector
from mixwell.utils.sections import Whole

CHUNK = 1 << 22


@final
class SketchedTraces(Traces):
    """A linear sketch ``S z_j`` of every trace: ``size`` numbers per domain.

    The recursion of a trace is linear, so it can run on the sketch: ``S z <- shrink * S z + rate * S P g``.
    Coordinate i of the parameters is multiplied by a random sign and added to bucket ``i mod s``, s a prime
    (so that no row length of a matrix is a multiple of it). As the signs are independent,
    ``E <S x, S y> = <x, y>``, with a variance of at most ``2 |x|^2 |y|^2 / s`` where energy is distributed evenly
    over the buckets. Signs are drawn anew for every round, so errors of different rounds do not add up. Each
    parameter group of the optimizer has a sketch of its own, since it may have its own decay; a parameter that
    gets no gradient in a step decays with its group (in dense traces it does not, as in the optimizer).

    In addition to ``m * size`` numbers, the signs take one byte per parameter, whatever m.

    Args:
        size: numbers per domain.

    References:
        Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (2002); Weinberger et al.,
        "Feature hashing for large scale multitask learning" (2009).
    """

    supports_skipping = True

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a sketch needs a size of at least 1, got {size}")
        self.size = int(size)
        self.seed = int(seed)

    def __repr__(self) -> str:
        return f"SketchedTraces({self.size}, seed={self.seed})"

    @override
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        if parameters.sharded:
            raise ValueError(
                f"{self!r} needs whole gradients, and the parameters are sharded (fully_shard): use "
                "DenseTraces(), which are sharded as they are, or ProjectedTraces()"
            )
        self._parameters = parameters
        self._step = step
        self._clipping = GradientSketches(parameters, domains)
        self._empty = True
        self._decayed = False
        self._groups = sorted(set(parameters.groups))
        device = parameters.tensors[0].device
        dtype = torch.promote_types(parameters.tensors[0].dtype, torch.float32)
        counts = dict.fromkeys(self._groups, 0)
        for tensor, group in zip(parameters.tensors, parameters.groups, strict=True):
            counts[group] += tensor.numel()
        self._stored = {
            g: torch.zeros(
                domains, prime_below(self.size * counts[g] // parameters.numel), dtype=dtype, device=device
            )
            for g in self._groups
        }
        self._scale = dict.fromkeys(self._groups, 1.0)
        self._signs = [torch.empty(p.numel(), dtype=torch.int8, device=p.device) for p in parameters.tensors]
        self._draw_signs(0)
        for group in self._groups:
            self._shrink(group, step)

    @override
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        for stored in self._stored.values():
            stored.zero_()
        self._scale = dict.fromkeys(self._groups, 1.0)
        self._empty = True
        self._draw_signs(round_index)

    @override
    def begin_step(self, step: StepModel) -> None:
        # The sketches decay with the first gradient, so that a step without any can be begun again.
        self._step, self._decayed = step, False
        self._clipping.clear()

    @property
    @override
    def can_drop_step(self) -> bool:
        return not self._decayed

    @override
    def skip(self, step: StepModel, count: int) -> None:
        self._multiply({group: self._shrink(group, step) ** count for group in self._groups})

    def _decay(self) -> None:
        shrinks = {group: self._shrink(group, self._step) for group in self._groups}
        self._decayed = True
        self._multiply(shrinks)

    def _multiply(self, factors: Mapping[int, float]) -> None:
        for group, factor in factors.items():
            self._scale[group] *= factor
            if self._scale[group] < SMALLEST_SCALE:
                self._stored[group].mul_(self._scale[group])
                self._scale[group] = 1.0

    @override
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """``stored_j += rate * scale * S P g_j / decay``."""
        if not self._decayed:
            self._decay()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._clipping.add(domain, index, gradient, scale)
        self._fold({g: stored[domain] for g, stored in self._stored.items()}, gradients, scale)

    def _fold(self, targets: dict[int, Tensor], gradients: Gradients, scale: float) -> None:
        """``target += rate * scale * S P g / decay``."""
        self._sketch_into(
            targets,
            (
                None if gradient is None else response.precondition(gradient)
                for gradient, response in zip(gradients, self._step.responses, strict=True)
            ),
            [self._step.rate(i) * scale / self._scale[g] for i, g in enumerate(self._parameters.groups)],
        )

    def _differentiate_clipping(self, combined: Combined) -> None:
        """Subtract from every trace its part along the combined gradient, which clipping takes away."""
        along = self._clipping.coefficients(combined, combined.gradients)
        if along is None:
            return
        sketch = {g: torch.zeros_like(stored[0]) for g, stored in self._stored.items()}
        self._fold(sketch, combined.gradients, 1.0)
        for group, stored in self._stored.items():
            stored.addr_(
                torch.tensor(along, dtype=stored.dtype, device=stored.device), sketch[group], alpha=-1
            )

    @override
    def end_step(self, combined: Combined) -> None:
        """Differentiate clipping, and replace the factor that was assumed for a round's first step."""
        if not self._decayed:
            self._decay()
        self._differentiate_clipping(combined)
        if self._empty:
            for group in self._groups:
                self._scale[group] *= combined.clip / self._step.clip
        self._empty = self._decayed = False

    @override
    def dot(self, vector: Gradients) -> Vector:
        """``<S vector, S z_j>``, the mean over the processes."""
        sketch = {g: torch.zeros_like(stored[0]) for g, stored in self._stored.items()}
        self._sketch_into(sketch, vector, [1.0] * len(self._parameters))
        total = np.zeros(len(next(iter(self._stored.values()))))
        for group, stored in self._stored.items():
            total += self._scale[group] * (stored @ sketch[group]).double().cpu().numpy()
        return distributed.all_reduce_sum(total, self._parameters.device) / distributed.world_size()

    @property
    @override
    def nbytes(self) -> int:
        sketches = [*self._stored.values(), *self._signs]
        return sum(s.nbytes for s in sketches) + self._clipping.nbytes

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Return the sketches; the signs follow from the seed and the round."""
        scales = {str(g): s for g, s in self._scale.items()}
        values: Json = {"scale": scales, "round": self._round, "empty": self._empty}
        return values, {str(g): s for g, s in self._stored.items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        scales = cast("dict[str, float]", values["scale"])
        for group, stored in self._stored.items():
            self._scale[group] = float(scales[str(group)])
            stored.copy_(tensors[str(group)])
        self._empty = bool(values["empty"])
        self._draw_signs(int(cast("int", values["round"])))

    def _shrink(self, group: int, step: StepModel) -> float:
        """Return the decay of a group's sketch: one number, the greatest of its parameters'.

        Parameters of one group differ by less than a thousandth where Adam has not stepped all of them
        equally often (experts, parameters that were frozen).
        """
        members = [i for i, g in enumerate(self._parameters.groups) if g == group]
        # A parameter that does not respond to gradients has no trace that could decay.
        moved = [i for i in members if step.rate(i)] or members
        shrinks = step.scalar_shrinks(moved)
        if shrinks is None or max(shrinks) - min(shrinks) > 1e-3:
            raise ValueError(
                "sketched traces need one decay per parameter group: use IsotropicCurvature, and AdamW instead of "
                "Adam with weight decay; or use DenseTraces"
            )
        return max(shrinks)

    def _draw_signs(self, round_index: int) -> None:
        self._round = round_index
        for index, signs in enumerate(self._signs):
            if signs.is_meta:  # where memory is only counted
                continue
            signs.copy_(
                random_signs(signs.shape, random_stream(self.seed, round_index, index), dtype=torch.int8)
            )

    def _sketch_into(
        self, targets: dict[int, Tensor], tensors: Iterable[Tensor | None], factors: list[float]
    ) -> None:
        offsets = dict.fromkeys(self._groups, 0)
        for index, tensor in enumerate(tensors):
            group = self._parameters.groups[index]
            start = offsets[group]
            offsets[group] += self._signs[index].numel()
            if tensor is None or not factors[index]:
                continue
            target = targets[group]
            for piece, signs in zip(
                tensor.detach().flatten().split(CHUNK), self._signs[index].split(CHUNK), strict=True
            ):
                fold_into(target, piece.to(target.dtype) * signs, start, factors[index])
                start += piece.numel()


@final
@TRACES.register("sketched")
class SketchedTracesConfig(TracesConfig):
    """A sketch for every domain."""

    with_sharded_parameters = "unsupported"

    sketch_size: Whole = 65_536
    """Numbers per domain of sketched traces."""

    @override
    def build(self) -> Traces:
        return SketchedTraces(self.sketch_size)

    @override
    def least_bytes(self, parameters: int, domains: int) -> int:
        return 4 * self.sketch_size * domains + parameters

    @override
    def clipping_bytes(self, parameters: int, domains: int) -> int:
        return sketch_bytes(parameters, domains)
