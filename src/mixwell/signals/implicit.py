"""Hypergradients of the minimizer, by the implicit function theorem, at the parameters that a round ends with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters, cuda_devices
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.signals.twin_networks import evaluating, expected_probes
from mixwell.typing import Gradients, Json, Vector

Solver = Literal["cg", "neumann", "single-loop"]
Product = Callable[[Tensor], Tensor]

# A residual so small, relative to what is solved for, is rounding.
SOLVED = 1e-12
# A product with the Hessian is a backward pass through a backward pass.
PRODUCT = 2.0


@final
class ImplicitGradient(Signal):
    r"""``h_j = -<grad l_j, (H + lambda I)^-1 grad L_V>``, all at the parameters at the end of a round (Eq. 2).

    H is the Hessian of ``sum_j w_j l_j`` and the gradients of the domains are of the same fresh batch each, in
    evaluation mode; the validation gradient is the loop's. It is the derivative of the validation loss by the
    weights if the model were trained to the end, as if it were there already. How the steps of a round got
    there does not matter to it. The inverse is approximated by one of:

    - ``"cg"``: at most ``iterations`` steps of conjugate gradients. They end with what they have where the
      curvature along a direction is not positive, since then there is no minimizer. ``warm`` starts at the last
      round's solution (Pedregosa 2016).
    - ``"neumann"``: ``eta sum_{i < iterations} (I - eta (H + lambda I))^i``, ``iterations - 1`` products, which
      converges for ``eta < 2 / (L + lambda)`` (Lorraine et al. 2020, Grazzi et al. 2020).
    - ``"single-loop"``: ``v <- v - eta ((H + lambda I) v - grad L_V)``, one product for each round, v carried from
      round to round and ``h_j = -<grad l_j, v>`` (Ji et al. 2021; Dagreou et al. 2022).

    A product is a second backward pass through the first, so the model must not be compiled, and attention is
    computed without flash kernels here. Where parameters are on several devices, vectors of all are on the first.

    Args:
        solver: which of the three.
        iterations: of conjugate gradients, or terms of the series; not used by ``"single-loop"``.
        damping: lambda.
        learning_rate: eta of the series or of the single loop; by default that of the optimizer's first group.
        warm: whether conjugate gradients start where they ended in the round before.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        solver: Solver = "cg",
        *,
        iterations: int = 10,
        damping: float = 0.0,
        learning_rate: float | None = None,
        warm: bool = False,
    ) -> None:
        if solver not in get_args(Solver):
            raise ValueError(f"solver must be 'cg', 'neumann' or 'single-loop', got {solver!r}")
        if iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {iterations}")
        if not (math.isfinite(damping) and damping >= 0):
            raise ValueError(f"damping must be finite and not negative, got {damping}")
        if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"learning_rate must be positive and finite, got {learning_rate}")
        self.solver: Solver = solver
        self.iterations, self.damping = int(iterations), float(damping)
        self.learning_rate, self.warm = learning_rate, warm
        self._attached = False

    def __repr__(self) -> str:
        return (
            f"ImplicitGradient({self.solver!r}, iterations={self.iterations}, damping={self.damping!r}, "
            f"learning_rate={self.learning_rate!r}, warm={self.warm})"
        )

    @property
    def supports_mixed_batches(self) -> bool:
        """Training itself is not looked at."""
        return True

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the run.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: where rows and losses come from.

        Raises:
            ValueError: it is in use by another mixer.
        """
        if self._attached:
            raise ValueError("this ImplicitGradient is in use by another mixer; make a new one for each")
        self._probes = expected_probes(self, probes, parameters, domains, validation=False)
        self._optimizer, self._parameters, self._domains = optimizer, parameters, tuple(domains)
        self._weights = np.full(len(domains), 1 / len(domains))
        self._carried = self._flat([None] * len(parameters)) if self._carries else None
        self._numbers: dict[str, float] = {}
        self._attached = True

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Remember the weights.

        Args:
            round_index: not used.
            weights: of the domains, shape ``(m,)``.
            validation: not used.
        """
        self._weights = weights.copy()

    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        """Nothing.

        Args:
            row_groups: not used.
            weights: not used.

        Returns:
            A context that does nothing.
        """
        return nullcontext(CaptureContext())

    def scores(self, validation: Gradients | None) -> Vector:
        """``h_j = -<grad l_j, v>`` with v the approximate ``(H + lambda I)^-1 grad L_V``.

        Args:
            validation: the validation gradient at the current parameters.

        Returns:
            Shape ``(m,)``.
        """
        assert validation is not None
        with (
            evaluating(self._probes.model),
            self._parameters.buffers_kept(),
            torch.enable_grad(),
        ):
            gradients, product = self._local()
            with torch.no_grad():
                found = self._solve(self._flat(validation), product)
                scores = -torch.stack([gradient @ found for gradient in gradients])
        # What is not finite ends the round without an update; it must not stay in what is carried on.
        if self._carried is not None and bool(found.isfinite().all()):
            self._carried.copy_(found)
        return scores.double().cpu().numpy()

    @property
    def nbytes(self) -> int:
        """The memory of what is carried from round to round."""
        return 0 if self._carried is None else self._carried.nbytes

    def summary(self) -> dict[str, float]:
        """The number of products, and the residual ``|g_V - (H + lambda I) v| / |g_V|`` of conjugate gradients."""
        return {name: value for name, value in self._numbers.items() if math.isfinite(value)}

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The weights of the round, and what is carried."""
        tensors = {} if self._carried is None else {"carried": self._carried}
        return {"weights": self._weights.tolist()}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: the weights.
            tensors: what is carried.
        """
        self._weights = np.array(values["weights"], dtype=np.float64)
        if self._carried is not None:
            self._carried.copy_(tensors["carried"])

    @property
    def _carries(self) -> bool:
        return self.solver == "single-loop" or (self.solver == "cg" and self.warm)

    def _solve(self, target: Tensor, product: Product) -> Tensor:
        count = 0

        def damped(vector: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return product(vector).add_(vector, alpha=self.damping)

        self._numbers = {}
        if self.solver == "cg":
            found, residual = conjugate_gradient(
                damped, target, iterations=self.iterations, start=self._carried
            )
            self._numbers["residual"] = residual
        elif self.solver == "neumann":
            found = neumann_series(damped, target, rate=self._rate(), terms=self.iterations)
        else:
            assert self._carried is not None
            found = self._carried - self._rate() * (damped(self._carried) - target)
        self._numbers["products"] = float(count)
        return found

    def _rate(self) -> float:
        return self.learning_rate or float(self._optimizer.param_groups[0]["lr"])

    def _local(self) -> tuple[list[Tensor], Product]:
        """The domains' gradients on fresh batches, and the product with the Hessian of their weighted sum."""
        tensors = self._parameters.tensors
        trained = [i for i, p in enumerate(tensors) if p.requires_grad]
        inputs = [tensors[i] for i in trained]
        batches = [self._probes.batch(name) for name in self._domains]
        flat: list[Tensor] = []
        total: Gradients = [None] * len(inputs)
        for batch, weight in zip(batches, self._weights.tolist(), strict=True):
            with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(cuda_devices(tensors)):
                loss = self._probes.loss(self._probes.model, batch)
            found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            flat.append(self._flat(self._placed(trained, found)))
            total = [_plus(sum_, weight, g) for sum_, g in zip(total, found, strict=True)]
        curved = [(i, g) for i, g in enumerate(total) if g is not None and g.requires_grad]

        def product(vector: Tensor) -> Tensor:
            for batch in batches:
                self._probes.charge(batch, PRODUCT)
            if not curved:  # all losses are linear
                return torch.zeros_like(vector)
            parts = self._parts(vector)
            with torch.enable_grad():
                found = torch.autograd.grad(
                    [g for _, g in curved],
                    inputs,
                    grad_outputs=[parts[trained[i]].to(g) for i, g in curved],
                    retain_graph=True,
                    allow_unused=True,
                )
            return self._flat(self._placed(trained, found))

        return flat, product

    def _placed(self, indices: Sequence[int], found: Sequence[Tensor | None]) -> Gradients:
        gradients: Gradients = [None] * len(self._parameters)
        for index, gradient in zip(indices, found, strict=True):
            gradients[index] = gradient
        return gradients

    def _flat(self, gradients: Gradients) -> Tensor:
        """One vector of all parameters, zero where there is no gradient, in float32 or better."""
        tensors = self._parameters.tensors
        kind, device = torch.float32, tensors[0].device
        for tensor in tensors:
            kind = torch.promote_types(kind, tensor.dtype)
        whole = torch.zeros(self._parameters.numel, dtype=kind, device=device)
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
    """An approximate solution of ``M x = b`` with a symmetric M that should be positive definite.

    Args:
        product: ``M v``.
        target: b, shape ``(d,)``.
        iterations: at most so many steps.
        start: where to begin, in place of 0; costs a product more unless it is 0.

    Returns:
        What it has when it is solved, when the steps are done, or when the curvature along a direction is not
        positive; and the residual ``|b - M x| / |b|`` by its own recursion.
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
    """``eta sum_{i < terms} (I - eta M)^i b``, which tends to ``M^-1 b`` for ``0 < eta M < 2``.

    Args:
        product: ``M v``.
        target: b, shape ``(d,)``.
        rate: eta.
        terms: at least 1; one product less.

    Returns:
        Shape ``(d,)``.
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
