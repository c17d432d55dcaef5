"""Implicit differentiation: hypergradients of the minimizer, at the parameters at the end of a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.hypergradient.parameters import cuda_devices
from mixwell.signals.base import Requirements, Signal
from mixwell.signals.checks import require_at_least, require_choice, require_not_negative, require_positive
from mixwell.signals.finite_draws import FiniteDraws, fill_missing
from mixwell.signals.probes import Probes, evaluation_mode, parameter_gradients, require_probes
from mixwell.typing import Gradients, Vector

Solver = Literal["cg", "neumann", "single-loop"]
Product = Callable[[Tensor], Tensor]

# A smaller residual, relative to the right-hand side, is rounding.
SOLVED = 1e-12
# A product with the Hessian is a backward pass through a backward pass.
PRODUCT = 2.0


@final
@dataclass(eq=False)
class ImplicitGradient(Signal):
    r"""``h_j = -<grad l_j, (H + lambda I)^-1 grad L_V>``, all at the parameters at the end of a round (Eq. 2).

    H is the Hessian of ``sum_j w_j l_j``; it and the gradients of the domains use the same fresh batches, in
    evaluation mode; the validation gradient is the loop's. This is the derivative of the validation loss by the
    weights as if the model were at the minimizer already, independent of the steps of the round. The inverse is
    approximated by one of:

    - ``"cg"``: at most ``iterations`` steps of conjugate gradients, which stop where the curvature along a
      direction is not positive, since then there is no minimizer. ``warm`` starts at the last round's solution
      (Pedregosa 2016).
    - ``"neumann"``: ``eta sum_{i < iterations} (I - eta (H + lambda I))^i``, ``iterations - 1`` products, which
      converges for ``eta < 2 / (L + lambda)`` (Lorraine et al. 2020, Grazzi et al. 2020).
    - ``"single-loop"``: ``v <- v - eta ((H + lambda I) v - grad L_V)``, one product for each round, v carried from
      round to round and ``h_j = -<grad l_j, v>`` (Ji et al. 2021; Dagreou et al. 2022).

    A product is a second backward pass through the first, so the model must not be compiled, and attention is
    computed without flash kernels here. Where parameters are on several devices, flat vectors are on the first.

    Args:
        iterations: of conjugate gradients, or terms of the series; not used by ``"single-loop"``.
        damping: lambda.
        learning_rate: eta of the series or of the single loop; by default that of the optimizer's first group.
        warm: whether conjugate gradients start where they ended in the round before.
    """

    solver: Solver = "cg"
    _: KW_ONLY
    iterations: int = 10
    damping: float = 0.0
    learning_rate: float | None = None
    warm: bool = False

    requirements = Requirements(domain_batches=False)
    _saved = ("_weights", "_carried")

    def __post_init__(self) -> None:
        require_choice(Solver, solver=self.solver)
        require_at_least(1, iterations=self.iterations)
        require_not_negative(damping=self.damping)
        require_positive(learning_rate=self.learning_rate)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        self._probes = require_probes(self, probes, self._parameters, self._domains)
        self._draws = FiniteDraws(self._probes, self._reject)
        self._optimizer = optimizer
        self._weights = np.full(len(self._domains), 1 / len(self._domains))
        carries = self.solver == "single-loop" or (self.solver == "cg" and self.warm)
        self._carried = self._flat([None] * len(self._parameters)) if carries else None
        self._numbers: dict[str, float] = {}

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights

    @override
    def scores(self, validation: Gradients | None) -> Vector | None:
        """Return the scores; a domain without a finite batch has the mean of the others' scores."""
        assert validation is not None
        with evaluation_mode(self._probes.model), self._parameters.buffers_kept(), torch.enable_grad():
            gradients, product = self._local()
            if not any(gradient is not None for gradient in gradients):
                return None
            with torch.no_grad():
                solution = self._solve(self._flat(validation), product)
                scores = [None if g is None else -float((g @ solution).double()) for g in gradients]
        # A non-finite solution ends the round without an update; it must not be carried to the next.
        if self._carried is not None and bool(solution.isfinite().all()):
            self._carried.copy_(solution)
        return fill_missing(scores)

    @property
    @override
    def nbytes(self) -> int:
        return 0 if self._carried is None else self._carried.nbytes

    @override
    def summary(self) -> dict[str, float]:
        """Return the number of products, and the residual ``|g_V - (H + lambda I) v| / |g_V|`` of ``"cg"``."""
        return {name: value for name, value in self._numbers.items() if math.isfinite(value)}

    def _solve(self, target: Tensor, product: Product) -> Tensor:
        count = 0

        def damped(vector: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return product(vector).add_(vector, alpha=self.damping)

        self._numbers = {}
        if self.solver == "cg":
            solution, residual = conjugate_gradient(
                damped, target, iterations=self.iterations, start=self._carried
            )
            self._numbers["residual"] = residual
        elif self.solver == "neumann":
            solution = neumann_series(damped, target, rate=self._rate(), terms=self.iterations)
        else:
            assert self._carried is not None
            solution = self._carried - self._rate() * (damped(self._carried) - target)
        self._numbers["products"] = float(count)
        return solution

    def _rate(self) -> float:
        return self.learning_rate or float(self._optimizer.param_groups[0]["lr"])

    def _local(self) -> tuple[list[Tensor | None], Product]:
        """Return the domains' gradients on fresh batches, and the Hessian product of their weighted sum.

        A domain without a finite batch is left out of both.
        """
        tensors = self._parameters.tensors
        drawn = [self._probes.batch(name) for name in self._domains]
        batches: list[Any] = []
        flat: list[Tensor | None] = []
        total: Gradients = [None] * len(tensors)
        for name, first, weight in zip(self._domains, drawn, self._weights.tolist(), strict=True):
            found = self._draws.compute(name, self._gradient, self._finite, first=first)
            if found is None:
                flat.append(None)
                continue
            batch, gradients = found
            batches.append(batch)
            flat.append(self._flat(gradients))
            total = [_plus(sum_, weight, g) for sum_, g in zip(total, gradients, strict=True)]
        curved = [(i, g) for i, g in enumerate(total) if g is not None and g.requires_grad]

        def product(vector: Tensor) -> Tensor:
            for batch in batches:
                self._probes.charge(batch, PRODUCT)
            if not curved:  # all losses are linear
                return torch.zeros_like(vector)
            parts = self._parts(vector)
            with torch.enable_grad():
                products = parameter_gradients(
                    self._parameters,
                    [g for _, g in curved],
                    grad_outputs=[parts[i].to(g) for i, g in curved],
                    retain_graph=True,
                )
            return self._flat(products)

        return flat, product

    def _gradient(self, batch: Any) -> tuple[Any, Gradients]:
        """Return a batch, and the gradient of its loss with its graph."""
        with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(cuda_devices(self._parameters.tensors)):
            loss = self._probes.loss(self._probes.model, batch)
        return batch, parameter_gradients(self._parameters, loss, create_graph=True)

    def _finite(self, found: tuple[Any, Gradients]) -> bool:
        return self._parameters.non_finite(found[1]) is None

    def _flat(self, gradients: Gradients) -> Tensor:
        """Return one vector of all parameters, zero where there is no gradient, in float32 or better."""
        tensors = self._parameters.tensors
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        whole = torch.zeros(self._parameters.numel, dtype=dtype, device=self._parameters.device)
        for part, gradient in zip(self._parts(whole), gradients, strict=True):
            if gradient is not None:
                part.copy_(gradient.detach())
        return whole

    def _parts(self, vector: Tensor) -> list[Tensor]:
        tensors = self._parameters.tensors
        sizes = [p.numel() for p in tensors]
        return [part.view(p.shape) for part, p in zip(vector.split(sizes), tensors, strict=True)]


def conjugate_gradient(
    product: Product, target: Tensor, *, iterations: int, start: Tensor | None = None
) -> tuple[Tensor, float]:
    """Solve ``M x = b`` approximately, with a symmetric M that should be positive definite.

    Args:
        product: ``M v``.
        target: b, shape ``(d,)``.
        start: the initial solution, by default 0; otherwise it costs one more product.

    Returns:
        The solution when it converged, when the steps are done, or when the curvature along a direction is not
        positive; and the residual ``|b - M x| / |b|`` by the recursion.
    """
    begun = start is not None and bool(start.any())
    solution = start.clone() if start is not None else torch.zeros_like(target)
    residual = target - product(solution) if begun else target.clone()
    direction = residual.clone()
    squared, size = float(residual @ residual), float(target.norm())
    for _ in range(iterations):
        if not math.sqrt(squared) > SOLVED * size:
            break
        curved = product(direction)
        curvature = float(direction @ curved)
        if not math.isfinite(curvature):
            return torch.full_like(target, math.nan), math.nan
        if curvature <= 0:
            break
        step = squared / curvature
        solution.add_(direction, alpha=step)
        residual.sub_(curved, alpha=step)
        before, squared = squared, float(residual @ residual)
        direction.mul_(squared / before).add_(residual)
    return solution, math.sqrt(squared) / size if size > 0 else 0.0


def neumann_series(product: Product, target: Tensor, *, rate: float, terms: int) -> Tensor:
    """Return ``eta sum_{i < terms} (I - eta M)^i b``, which tends to ``M^-1 b`` for ``0 < eta M < 2``.

    Args:
        product: ``M v``.
        target: b, shape ``(d,)``.
        rate: eta.
        terms: at least 1; one product less.
    """
    power = target.clone()
    total = target.clone()
    for _ in range(terms - 1):
        power = power - rate * product(power)
        total += power
    return rate * total


def _plus(total: Tensor | None, weight: float, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    return weight * gradient if total is None else total + weight * gradient
