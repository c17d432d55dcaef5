"""Curvature measured on the user's own losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.curvature import Coefficients, Curvature, RoundStart, checked_gamma
from mixwell.hypergradient.parameters import Parameters, cuda_devices, inner_products
from mixwell.typing import Gradients

Probe = Callable[[str], Callable[[], Tensor]]
"""``probe(domain)`` draws a batch and returns a function that computes the domain's loss on it."""


@final
class MeasuredCurvature(Curvature):
    """Curvature measured at the start of every round.

    - ``"isotropic"``: the Rayleigh quotient of the weighted training loss along the validation gradient v,
      the only direction that the hypergradient looks at. In the optimizer's geometry, with ``u = P v``:
      ``gamma = <u, H u> / <v, u>``. One Hessian product.
    - ``"per-tensor"``: the same, block by block, from the same product.
    - ``"diagonal"``: Hutchinson's estimate ``mean_i r_i * (H r_i)`` over random signs r. ``samples`` products.

    A Hessian product is a central difference of two gradients on the same batches with the same dropout, so
    it only needs ``.backward()`` and works where double backward does not (flash attention, compiled models).
    Negative values count as zero, as the paper asks for ``gamma > 0``, and values beyond ``1 / eta`` as that.
    The first round has no validation gradient yet and uses ``initial``.

    Args:
        probe: ``probe(domain)`` draws a batch of the domain and returns a function of no arguments that
            computes its training loss (called twice per product).
        shape: which of the three.
        initial: gamma of the first round.
        samples: how many random directions ``"diagonal"`` averages over.
        seed: of these directions.

    Raises:
        ValueError: the shape is unknown, ``initial`` is negative, or there are no samples.

    References:
        Hutchinson, "A stochastic estimator of the trace of the influence matrix" (1989); Bekas, Kokiopoulou,
        Saad, "An estimator for the diagonal of a matrix" (2007).
    """

    def __init__(
        self,
        probe: Probe,
        shape: Literal["isotropic", "per-tensor", "diagonal"] = "isotropic",
        *,
        initial: float = 0.01,
        samples: int = 4,
        seed: int = 0,
    ) -> None:
        if shape not in ("isotropic", "per-tensor", "diagonal"):
            raise ValueError(f"shape must be 'isotropic', 'per-tensor' or 'diagonal', got {shape!r}")
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.probe = probe
        self.shape = shape
        self.initial = checked_gamma("initial", initial)
        self.samples = samples
        self.seed = seed
        self._measured = 0

    def __repr__(self) -> str:
        return (
            f"MeasuredCurvature({self.shape!r}, initial={self.initial!r}, samples={self.samples}, "
            f"seed={self.seed})"
        )

    def bind(self, parameters: Parameters) -> None:
        """Start from the initial gamma.

        Args:
            parameters: what is trained.

        Raises:
            ValueError: the diagonal is wanted of parameters that are spread over processes.
        """
        if self.shape == "diagonal" and parameters.sharded:
            raise ValueError(
                "MeasuredCurvature('diagonal') needs whole parameters, and these are sharded (fully_shard); use "
                "'isotropic' or 'per-tensor'"
            )
        super().bind(parameters)
        self._coefficients: Coefficients = [self.initial] * len(parameters)

    def begin_round(self, start: RoundStart) -> None:
        """Measure.

        Args:
            start: weights, validation gradient and preconditioners.
        """
        if start.validation is None:
            return
        losses = {name: self.probe(name) for name in start.domains}
        self._measured += 1
        if self.shape == "diagonal":
            self._coefficients = list(self._diagonal(losses, start))
            return
        responses = start.responses()
        direction: Gradients = [
            None if v is None else r.precondition(v) for v, r in zip(start.validation, responses, strict=True)
        ]
        product = self._product(losses, start.weights, direction)
        # Of this process's rows; the products are the mean of those of all.
        curved = np.array(inner_products(direction, product))
        curved = distributed.all_reduce_sum(curved, self.parameters.device) / distributed.world_size()
        curved = curved.tolist()
        length = inner_products(start.validation, direction)
        if self.shape == "isotropic":
            rate = max(abs(r.rate) for r in responses)
            gamma = _within(sum(curved), sum(length), rate)
            self._coefficients = [gamma] * len(self.parameters)
        else:
            self._coefficients = [
                _within(c, n, abs(r.rate)) for c, n, r in zip(curved, length, responses, strict=True)
            ]

    def coefficients(self) -> Coefficients:
        """What was measured last."""
        return self._coefficients

    def summary(self) -> float | None:
        """The measured gamma."""
        first = self._coefficients[0]
        return first if self.shape == "isotropic" and isinstance(first, float) else None

    def state(self) -> dict[str, Tensor]:
        """What was measured, and how often."""
        saved = {"measured": torch.tensor(self._measured)}
        for name, tensor, value in zip(
            self.parameters.names, self.parameters.tensors, self._coefficients, strict=True
        ):
            if isinstance(value, Tensor):
                saved[name] = value
            elif self.shape == "diagonal":  # of the full shape from the start
                saved[name] = torch.full_like(tensor, value, requires_grad=False)
            else:
                saved[name] = torch.tensor(value, dtype=torch.float64)
        return saved

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what was measured.

        Args:
            state: what :meth:`state` gave.
        """
        self._measured = int(state["measured"])
        if self.shape != "diagonal":
            self._coefficients = [float(state[name]) for name in self.parameters.names]
        elif self._measured:
            self._coefficients = [
                state[name].to(tensor.device)
                for name, tensor in zip(self.parameters.names, self.parameters.tensors, strict=True)
            ]
        else:
            self._coefficients = [self.initial] * len(self.parameters)

    def _diagonal(self, losses: Mapping[str, Callable[[], Tensor]], start: RoundStart) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._measured)
        total = [torch.zeros_like(p) for p in self.parameters.tensors]
        for _ in range(self.samples):
            signs: Gradients = [
                torch.randint(0, 2, p.shape, generator=generator).to(p).mul_(2).sub_(1)
                for p in self.parameters.tensors
            ]
            for sum_, sign, curved in zip(
                total, signs, self._product(losses, start.weights, signs), strict=True
            ):
                if sign is not None and curved is not None:
                    sum_.addcmul_(sign, curved, value=1 / self.samples)
        return [distributed.all_reduce_mean(t).clamp_min_(0.0) for t in total]

    def _product(
        self, losses: Mapping[str, Callable[[], Tensor]], weights: Sequence[float], direction: Gradients
    ) -> Gradients:
        """``H u ~ (grad L(theta + e u) - grad L(theta - e u)) / (2 e)``, the parameters restored exactly."""
        tensors = self.parameters.tensors
        norm = math.sqrt(sum(inner_products(direction, direction)))
        if norm == 0:
            return [torch.zeros_like(p) for p in tensors]
        size = math.sqrt(sum(inner_products(tensors, tensors)))
        precision = max(torch.finfo(p.dtype).eps for p in tensors)
        epsilon = precision ** (1 / 3) * (1 + size) / norm
        kept = [p.detach().clone() for p in tensors]
        sides: list[Gradients] = []
        try:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p, old, d in zip(tensors, kept, direction, strict=True):
                        if d is not None:
                            p.copy_(torch.add(old, d, alpha=sign * epsilon))
                # The same dropout masks on both sides, and the run's own random stream undisturbed.
                with (
                    torch.random.fork_rng(cuda_devices(tensors)),
                    torch.enable_grad(),
                    self.parameters.buffers_kept(),
                    distributed.no_sync(self.parameters.model),
                ):
                    torch.manual_seed(self.seed)
                    for (name, loss), weight in zip(losses.items(), weights, strict=True):
                        value = loss()
                        if not bool(torch.isfinite(value).all()):
                            raise FloatingPointError(
                                f"non-finite training loss of {name!r} while measuring the curvature: look at "
                                "the batch that the probe drew, or give a fixed gamma"
                            )
                        (weight * value).backward()
                sides.append(self.parameters.take_gradients())
        finally:
            self.parameters.clear_gradients()
            with torch.no_grad():
                for p, old in zip(tensors, kept, strict=True):
                    p.copy_(old)
        return [
            None if a is None or b is None else a.sub_(b).div_(2 * epsilon)
            for a, b in zip(*sides, strict=True)
        ]


def _within(curved: float, length: float, rate: float) -> float:
    """A Rayleigh quotient between zero and the inverse of the learning rate."""
    quotient = curved / length if length > 0 else 0.0
    if not math.isfinite(quotient):
        raise FloatingPointError("the measured curvature is not finite; give a fixed gamma")
    return min(max(quotient, 0.0), 1 / rate if rate > 0 else math.inf)
