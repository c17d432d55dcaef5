"""The H of a round (Eq. 7): how the effect of a gradient fades over the steps that follow it.

A curvature gives one coefficient per parameter. A number c says ``P H ~ c I`` for that parameter, P the
optimiser's preconditioner (the identity for SGD, the paper's case); a tensor is the diagonal of H.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from mixwell.optimizers import Response
from mixwell.parameters import Gradients, Parameters, inner_products

Coefficients = list[float | Tensor]
Probe = Callable[[str], Callable[[], Tensor]]
"""``probe(domain)`` draws a batch and returns a function that computes the domain's loss on it."""


@final
@dataclass(frozen=True)
class RoundStart:
    """What is known when a round begins.

    Args:
        domains: the names of the domains.
        weights: their weights in the new round.
        validation: the validation gradient at the current parameters, ``None`` before the first one.
        responses: how each parameter answers a gradient now.
    """

    domains: Sequence[str]
    weights: Sequence[float]
    validation: Gradients | None
    responses: Sequence[Response]


class Curvature(ABC):
    """The curvature of the weighted training loss, exact or approximate."""

    exact_products: bool = False
    """Whether the signal must take Hessian products itself, at every step (Algorithm 1)."""

    def bind(self, parameters: Parameters) -> None:
        """Learn of the parameters, and check that this curvature fits them.

        Args:
            parameters: what is trained.
        """
        self.parameters = parameters

    def begin_round(self, start: RoundStart) -> None:
        """Prepare H of a round.

        Args:
            start: what is known.
        """

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The coefficient of every parameter in this round."""

    def summary(self) -> float | None:
        """One number for reports, where there is one."""
        return None

    def state(self) -> dict[str, Tensor]:
        """What a run resumed in mid-round needs to know."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: its tensors.
        """


@final
class IsotropicCurvature(Curvature):
    """``H = gamma I``, the paper's practical choice (appendix "A Practically-Usable Hessian Approximation").

    Args:
        gamma: the curvature; the paper's experiments use 0.01.

    Raises:
        ValueError: gamma is negative or not finite.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = _checked_gamma("gamma", gamma)

    def __repr__(self) -> str:
        return f"IsotropicCurvature({self.gamma:g})"

    def coefficients(self) -> Coefficients:
        """Gamma for every parameter."""
        return [self.gamma] * len(self.parameters)

    def summary(self) -> float:
        """Gamma."""
        return self.gamma


@final
class PerTensorCurvature(Curvature):
    """One gamma per parameter tensor.

    Args:
        gammas: by parameter name.
        default: for the parameters that are not named.

    Raises:
        ValueError: a gamma is negative or not finite, or (when bound) a name is unknown.
    """

    def __init__(self, gammas: Mapping[str, float], *, default: float = 0.0) -> None:
        self.gammas = {name: _checked_gamma(name, gamma) for name, gamma in gammas.items()}
        self.default = _checked_gamma("default", default)

    def __repr__(self) -> str:
        return f"PerTensorCurvature({self.gammas}, default={self.default:g})"

    def bind(self, parameters: Parameters) -> None:
        """Check the names.

        Args:
            parameters: what is trained.
        """
        _check_names(self.gammas, parameters)
        super().bind(parameters)

    def coefficients(self) -> Coefficients:
        """The gamma of every parameter."""
        return [self.gammas.get(name, self.default) for name in self.parameters.names]


@final
class DiagonalCurvature(Curvature):
    """``H = diag(d)``.

    Args:
        diagonals: the diagonal of the Hessian by parameter name, each of the parameter's shape; zero for the
            parameters that are not named.
    """

    def __init__(self, diagonals: Mapping[str, Tensor]) -> None:
        self.diagonals = {name: value.detach() for name, value in diagonals.items()}

    def __repr__(self) -> str:
        return f"DiagonalCurvature({sorted(self.diagonals)})"

    def bind(self, parameters: Parameters) -> None:
        """Check names and shapes.

        Args:
            parameters: what is trained.

        Raises:
            ValueError: a name is unknown or a shape does not fit.
        """
        _check_names(self.diagonals, parameters)
        for name, tensor in zip(parameters.names, parameters.tensors, strict=True):
            given = self.diagonals.get(name)
            if given is not None and given.shape != tensor.shape:
                raise ValueError(
                    f"the diagonal of {name} has shape {tuple(given.shape)}, "
                    f"but the parameter has shape {tuple(tensor.shape)}"
                )
        super().bind(parameters)

    def coefficients(self) -> Coefficients:
        """The diagonal of every parameter."""
        return [self.diagonals.get(name, 0.0) for name in self.parameters.names]


@final
class ExactCurvature(Curvature):
    """Hessian products with the current batches at every step: Algorithm 1, Prop. "recursion".

    It costs m second-order passes per domain and step, and needs ``loss.backward(create_graph=True)`` in
    every ``mixer.domain(...)``. A reference for small problems.
    """

    exact_products = True

    def __repr__(self) -> str:
        return "ExactCurvature()"

    def coefficients(self) -> Coefficients:
        """Zeros: the products are taken by the traces."""
        return [0.0] * len(self.parameters)


@final
class MeasuredCurvature(Curvature):
    """Curvature measured at the start of every round.

    - ``"isotropic"``: the Rayleigh quotient of the weighted training loss along the validation gradient v,
      the only direction that the hypergradient looks at. In the optimiser's geometry, with ``u = P v``:
      ``gamma = <u, H u> / <v, u>``. One Hessian product.
    - ``"per-tensor"``: the same, block by block, from the same product.
    - ``"diagonal"``: Hutchinson's estimate ``mean_i r_i * (H r_i)`` over random signs r. ``samples`` products.

    A Hessian product is a central difference of two gradients on the same batches with the same dropout, so
    it only needs ``.backward()`` and works where double backward does not (flash attention, compiled models).
    Negative values count as zero, as the paper asks for ``gamma > 0``, and no step may more than cancel the
    trace. The first round has no validation gradient yet and uses ``initial``.

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
        self.initial = _checked_gamma("initial", initial)
        self.samples = samples
        self.seed = seed
        self._measured = 0

    def __repr__(self) -> str:
        return f"MeasuredCurvature({self.shape!r}, initial={self.initial:g})"

    def bind(self, parameters: Parameters) -> None:
        """Start from the initial gamma.

        Args:
            parameters: what is trained.
        """
        super().bind(parameters)
        self._coefficients: Coefficients = [self.initial] * len(parameters)

    def begin_round(self, start: RoundStart) -> None:
        """Measure.

        Args:
            start: weights, validation gradient and preconditioners.
        """
        if start.validation is None:
            return
        losses = [self.probe(name) for name in start.domains]
        self._measured += 1
        if self.shape == "diagonal":
            self._coefficients = list(self._diagonal(losses, start))
            return
        direction: Gradients = [
            None if v is None else (v if r.scale is None else v * r.scale)
            for v, r in zip(start.validation, start.responses, strict=True)
        ]
        product = self._product(losses, start.weights, direction)
        curved = inner_products(direction, product)
        length = inner_products(start.validation, direction)
        if self.shape == "isotropic":
            rate = max(abs(r.rate) for r in start.responses)
            gamma = _within(sum(curved), sum(length), rate)
            self._coefficients = [gamma] * len(self.parameters)
        else:
            self._coefficients = [
                _within(c, n, abs(r.rate)) for c, n, r in zip(curved, length, start.responses, strict=True)
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
        for name, value in zip(self.parameters.names, self._coefficients, strict=True):
            saved[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return saved

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what was measured.

        Args:
            state: what :meth:`state` gave.
        """
        self._measured = int(state["measured"])
        diagonal = self.shape == "diagonal" and self._measured > 0
        self._coefficients = [
            state[name].to(tensor.device) if diagonal else float(state[name])
            for name, tensor in zip(self.parameters.names, self.parameters.tensors, strict=True)
        ]

    def _diagonal(self, losses: list[Callable[[], Tensor]], start: RoundStart) -> list[Tensor]:
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
        return [t.clamp_min_(0.0) for t in total]

    def _product(
        self, losses: list[Callable[[], Tensor]], weights: Sequence[float], direction: Gradients
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
        devices = sorted({p.device.index for p in tensors if p.device.type == "cuda"})
        sides: list[Gradients] = []
        try:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    for p, old, d in zip(tensors, kept, direction, strict=True):
                        if d is not None:
                            p.copy_(torch.add(old, d, alpha=sign * epsilon))
                # The same dropout masks on both sides, and the run's own random stream undisturbed.
                with torch.random.fork_rng(devices), torch.enable_grad(), self.parameters.buffers_kept():
                    torch.manual_seed(self.seed)
                    for loss, weight in zip(losses, weights, strict=True):
                        (weight * loss()).backward()
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


def resolve(curvature: Curvature | float | None) -> Curvature:
    """The curvature that a setting means.

    Args:
        curvature: a curvature, a number (gamma), or ``None`` for the paper's gamma of 0.01.

    Returns:
        The curvature.
    """
    if curvature is None:
        return IsotropicCurvature(0.01)
    return curvature if isinstance(curvature, Curvature) else IsotropicCurvature(curvature)


def _within(curved: float, length: float, rate: float) -> float:
    """A Rayleigh quotient between zero and the inverse of the learning rate."""
    if not math.isfinite(curved):
        raise ValueError(
            "the measured curvature is not finite: a training loss given by the probe is NaN or infinite "
            "near the current parameters; check the probe's batches, or give a fixed gamma"
        )
    quotient = curved / length if length > 0 else 0.0
    return min(max(quotient, 0.0), 1 / rate if rate > 0 else math.inf)


def _checked_gamma(name: str, gamma: float) -> float:
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"curvature {name} must be finite and not negative, got {gamma}")
    return float(gamma)


def _check_names(given: Mapping[str, object], parameters: Parameters) -> None:
    unknown = sorted(set(given) - set(parameters.names))
    if unknown:
        raise ValueError(f"curvature names unknown parameters {unknown}; known: {list(parameters.names)}")
