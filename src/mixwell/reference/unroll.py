"""Reference hypergradients, independent of the estimators: oracles for the tests and baselines for users.

All functions take a :class:`Problem`, which has its parameters in one flat vector, and share these arguments: the
initial parameters (or the minimizer) ``theta``, shape ``(d,)``; the ``weights`` w of the domains, shape ``(m,)``,
not necessarily on the simplex; the ``learning_rate`` eta; and the ``horizon`` T. They return the hypergradient,
shape ``(m,)``. Most differentiate twice, so they need an uncompiled model without flash attention
(:func:`problem_from_model` disables it).

=====================  ==============================================================================
function               what it differentiates
=====================  ==============================================================================
``reverse_unroll``     T steps of SGD, by reverse mode through all of them
``forward_unroll``     the same by the paper's recursion (Prop. "recursion", Algorithm 1)
``truncated_reverse``  the last steps only (Shaban et al. 2019)
``implicit_cg``        the minimizer, by conjugate gradient (Eq. 2)
``implicit_neumann``   the minimizer, by a Neumann series (Lorraine et al. 2020)
=====================  ==============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


@final
@dataclass(frozen=True)
class Problem:
    """A bilevel problem on a flat parameter vector.

    Args:
        losses: ``losses(theta, t)`` returns the m domains' training losses at step t, shape ``(m,)``.
        validation: ``validation(theta)`` returns the validation loss, a scalar.
    """

    losses: Callable[[Tensor, int], Tensor]
    validation: Callable[[Tensor], Tensor]


def descend(problem: Problem, theta: Tensor, weights: Tensor, *, learning_rate: float, steps: int) -> Tensor:
    """Take steps of SGD on the weighted loss (Eq. 3), without derivatives, and return the parameters."""
    weights = weights.detach()
    for t in range(steps):
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(weights @ problem.losses(theta, t), theta)
        theta = theta - learning_rate * gradient
    return theta.detach()


def reverse_unroll(
    problem: Problem, theta: Tensor, weights: Tensor, *, learning_rate: float, horizon: int
) -> Tensor:
    """Return the exact T-step hypergradient by reverse mode. Memory grows with T.

    ``d L_V(theta_T) / d w_j`` with ``theta_{t+1} = theta_t - eta sum_j w_j grad l_j(theta_t)``.
    """
    return truncated_reverse(
        problem, theta, weights, learning_rate=learning_rate, horizon=horizon, window=horizon
    )


def truncated_reverse(
    problem: Problem, theta: Tensor, weights: Tensor, *, learning_rate: float, horizon: int, window: int
) -> Tensor:
    """Return the hypergradient through the last ``window`` of T steps, as if the steps before did not depend on w.

    Raises:
        ValueError: the window is not between 1 and the horizon.

    References:
        Shaban, Cheng, Hatch, Boots, "Truncated back-propagation for bilevel optimization" (2019).
    """
    if not 1 <= window <= horizon:
        raise ValueError(f"window must be between 1 and the horizon of {horizon}, got {window}")
    start = horizon - window
    theta = descend(problem, theta, weights, learning_rate=learning_rate, steps=start)
    theta = theta.requires_grad_()  # a leaf: the steps before the window do not depend on w
    weights = weights.detach().clone().requires_grad_()
    for t in range(start, horizon):
        (gradient,) = torch.autograd.grad(weights @ problem.losses(theta, t), theta, create_graph=True)
        theta = theta - learning_rate * gradient
    (hypergradient,) = torch.autograd.grad(problem.validation(theta), weights)
    return hypergradient


def forward_unroll(
    problem: Problem, theta: Tensor, weights: Tensor, *, learning_rate: float, horizon: int
) -> Tensor:
    """Return the exact T-step hypergradient by the paper's recursion (Prop. "recursion"), literally.

    ``Z_j <- (I - eta H_t) Z_j - eta grad l_j(theta_t)``, ``H_t`` the Hessian of the weighted loss at
    ``theta_t``; then ``<grad L_V(theta_T), Z_j>``. Memory does not grow with T.
    """
    weights = weights.detach()
    sensitivity = [torch.zeros_like(theta) for _ in weights]
    for t in range(horizon):
        theta = theta.detach().requires_grad_()
        losses = problem.losses(theta, t)
        gradients = [torch.autograd.grad(loss, theta, create_graph=True)[0] for loss in losses]
        total = sum((w * g for w, g in zip(weights, gradients, strict=True)), torch.zeros_like(theta))
        sensitivity = [
            z - learning_rate * (_hessian_vector_product(total, theta, z) + g.detach())
            for z, g in zip(sensitivity, gradients, strict=True)
        ]
        theta = theta - learning_rate * total
    target = _gradient(problem.validation, theta)
    return torch.stack([target @ z for z in sensitivity])


def implicit_cg(
    problem: Problem,
    theta: Tensor,
    weights: Tensor,
    *,
    tolerance: float = 1e-10,
    max_iterations: int | None = None,
    damping: float = 0.0,
) -> Tensor:
    """Return the hypergradient at the minimizer (Eq. 2), the inverse Hessian applied by conjugate gradient.

    ``-<grad l_j, (H + lambda I)^-1 grad L_V>`` at ``theta``, which should minimize the weighted loss of step 0.

    Args:
        tolerance: of the residual, relative to the validation gradient.
        max_iterations: of Hessian-vector products; ``10 d`` by default.
        damping: lambda, where the Hessian itself is not positive definite.

    Raises:
        ValueError: the Hessian is not positive definite along a search direction, or there is no convergence.
    """
    target = _gradient(problem.validation, theta)
    gradients, product = _gradients_and_hvp(problem, theta, weights)
    solution = torch.zeros_like(target)
    residual = target.clone()
    direction = residual.clone()
    squared = float(residual @ residual)
    goal = tolerance * math.sqrt(squared)
    limit = 10 * len(theta) if max_iterations is None else max_iterations
    for _ in range(limit):
        if math.sqrt(squared) <= goal:
            break
        curved = product(direction) + damping * direction
        curvature = float(direction @ curved)
        if curvature <= 0:
            raise ValueError(
                f"the Hessian of the weighted training loss is not positive definite (curvature {curvature:g} "
                "along a search direction), so the implicit hypergradient is not defined here; "
                "train longer, regularize, or use an unrolled one"
            )
        step = squared / curvature
        solution = solution + step * direction
        residual = residual - step * curved
        before, squared = squared, float(residual @ residual)
        direction = residual + (squared / before) * direction
    else:
        if math.sqrt(squared) > goal:
            raise ValueError(
                f"conjugate gradient did not converge in {limit} products: residual {math.sqrt(squared):.3g}, "
                f"wanted {goal:.3g}; raise max_iterations or tolerance"
            )
    return -torch.stack([g @ solution for g in gradients])


def implicit_neumann(
    problem: Problem,
    theta: Tensor,
    weights: Tensor,
    *,
    learning_rate: float,
    terms: int,
    damping: float = 0.0,
) -> Tensor:
    """Return the hypergradient at the minimizer (Eq. 2), the inverse Hessian as a Neumann series.

    ``H^-1 v ~ eta sum_{i < terms} (I - eta H)^i v``, which converges for ``eta < 2 / L``. With T terms it equals
    the hypergradient of T unrolled steps that start at the minimizer. With a damping lambda, H is ``H + lambda
    I``. The losses are those of step 0.

    References:
        Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation" (2020).
    """
    power = _gradient(problem.validation, theta)
    gradients, product = _gradients_and_hvp(problem, theta, weights)
    total = torch.zeros_like(power)
    for _ in range(terms):
        total = total + power
        power = power - learning_rate * (product(power) + damping * power)
    return -learning_rate * torch.stack([g @ total for g in gradients])


def problem_from_model(
    model: nn.Module,
    loss: Callable[[Callable[..., Any], Any], Tensor],
    batches: Sequence[Mapping[str, Any]],
    validation: Any,
) -> tuple[Problem, Tensor]:
    """Return a model and its data as a :class:`Problem`, and its trained parameters, shape ``(d,)``.

    The model itself is not changed.

    Args:
        loss: ``loss(model, batch)`` returns the mean loss of a batch; it calls its first argument like the model.
        batches: for every step the batch of every domain, in one order of domains.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    theta = torch.cat([p.detach().flatten() for p in trained.values()])

    def value(vector: Tensor, batch: Any) -> Tensor:
        parts = vector.split([p.numel() for p in trained.values()])
        named = {n: v.view_as(p) for (n, p), v in zip(trained.items(), parts, strict=True)}
        # Copies, so that running statistics do not change with the number of evaluations.
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, {**named, **fixed, **buffers}, args, kwargs)

        # The fused kernels of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            return loss(call, batch)

    def losses(vector: Tensor, t: int) -> Tensor:
        return torch.stack([value(vector, batch) for batch in batches[t].values()])

    return Problem(losses, lambda vector: value(vector, validation)), theta


def _gradient(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def _hessian_vector_product(gradient: Tensor, theta: Tensor, vector: Tensor) -> Tensor:
    if not gradient.requires_grad:  # all losses are linear
        return torch.zeros_like(vector)
    (product,) = torch.autograd.grad(gradient, theta, vector, retain_graph=True, materialize_grads=True)
    return product


def _gradients_and_hvp(
    problem: Problem, theta: Tensor, weights: Tensor
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Return the domains' gradients at a point, and the product with the Hessian of the weighted loss there."""
    point = theta.detach().requires_grad_()
    losses = problem.losses(point, 0)
    gradients = [torch.autograd.grad(loss, point, retain_graph=True)[0] for loss in losses]
    (total,) = torch.autograd.grad(weights.detach() @ losses, point, create_graph=True)
    return gradients, lambda vector: _hessian_vector_product(total, point, vector)
