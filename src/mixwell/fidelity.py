"""How close the estimated hypergradient is to the exact one, on the user's own model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell.comparison import rank_agreement, relative_error, sign_agreement, tangent_cosine
from mixwell.mixer import Mixer
from mixwell.parameters import cuda_devices
from mixwell.signals import Signal
from mixwell.weights import Vector, Weights

Loss = Callable[[nn.Module, Any], Tensor]


@final
@dataclass(frozen=True)
class Fidelity:
    """An estimated hypergradient beside the exact one of the same T steps.

    Args:
        domains: their names.
        horizon: T.
        estimate: the signal's, shape ``(m,)``.
        exact: by central differences of the real training run, shape ``(m,)``.
        cosine: of the two in the tangent space of the simplex. This is what the weights follow.
        sign_agreement: the share of domains that both would move in the same direction.
        rank_agreement: Kendall's tau of the two.
        relative_error: ``|estimate - exact| / |exact|``.
    """

    domains: tuple[str, ...]
    horizon: int
    estimate: Vector
    exact: Vector
    cosine: float
    sign_agreement: float
    rank_agreement: float
    relative_error: float

    def __str__(self) -> str:
        wide = max(len(name) for name in self.domains)
        rows = "\n".join(
            f"  {name:<{wide}}  {estimate:+.4e}  {exact:+.4e}"
            for name, estimate, exact in zip(self.domains, self.estimate, self.exact, strict=True)
        )
        return (
            f"hypergradient over {self.horizon} steps: tangent cosine {self.cosine:.4f}, signs agree for "
            f"{self.sign_agreement:.0%} of the domains, rank agreement {self.rank_agreement:+.2f}, "
            f"relative error {self.relative_error:.3f}\n  {'':<{wide}}  estimate     exact\n{rows}"
        )


def measure_fidelity(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Sequence[Mapping[str, Any]],
    validation: Any,
    *,
    signal: Callable[[], Signal] | None = None,
    weights: Mapping[str, float] | Sequence[float] | None = None,
    clip_norm: float | None = None,
    difference: float = 1e-2,
    double: bool = False,
) -> Fidelity:
    """Compare an estimate with the exact T-step hypergradient, where T is the number of ``batches``.

    The exact one is measured, not derived: every weight is moved up and down by ``difference``, the T steps
    are run again from the same start with the same batches and random numbers, and the validation losses are
    subtracted. So it holds for any optimiser, clipping and dropout. It costs ``2 m`` runs of T steps; give
    small batches. Everything happens on a copy: model and optimiser are left as they are.

    Args:
        model: the model, at any point of its training.
        optimizer: with its state at that point.
        loss: ``loss(model, batch)`` is the mean loss of a batch.
        batches: for each of the T steps the batch of every domain, by name.
        validation: the validation batch.
        signal: makes the estimator; by default :class:`mixwell.Hypergradient` with its defaults.
        weights: of the domains, uniform by default (``mixer.weights.last`` in mid-run).
        clip_norm: as in :class:`mixwell.Mixer`.
        difference: by how much a weight is moved. Smaller is more exact until rounding takes over.
        double: run on a copy in float64 (inputs must fit), to allow small differences.

    Returns:
        Both hypergradients and how well they agree.

    Raises:
        ValueError: there are no batches, or not every step has the same domains.
    """
    if not batches:
        raise ValueError("batches must hold one mapping of domain to batch for every step; got none")
    names = tuple(batches[0])
    for t, step in enumerate(batches):
        if tuple(step) != names:
            raise ValueError(f"step {t} has the domains {tuple(step)}, step 0 has {names}; they must agree")
    start = _Start(getattr(model, "_orig_mod", model), optimizer, double=double)
    point = Weights(names, weights)
    estimate = _estimate(start, loss, batches, validation, point, signal, clip_norm)
    exact = np.zeros(len(names))
    for index in range(len(names)):
        for sign in (1.0, -1.0):
            moved = point.values
            moved[index] += sign * difference
            value = _train(start, loss, batches, validation, moved, clip_norm)
            exact[index] += sign * value / (2 * difference)
    return Fidelity(
        domains=names,
        horizon=len(batches),
        estimate=estimate,
        exact=exact,
        cosine=tangent_cosine(estimate, exact),
        sign_agreement=sign_agreement(estimate, exact),
        rank_agreement=rank_agreement(estimate, exact),
        relative_error=relative_error(estimate, exact),
    )


@final
class _Start:
    """A model and its optimiser at one moment, of which copies can be had."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, double: bool) -> None:
        # Copied together, so that the copied optimiser trains the copied parameters.
        self._model, self._optimizer = copy.deepcopy((model, optimizer))
        if double:
            self._model.double()
            for state in self._optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        state[key] = value.double()

    def copy(self) -> tuple[nn.Module, Optimizer]:
        return copy.deepcopy((self._model, self._optimizer))


def _estimate(
    start: _Start,
    loss: Loss,
    batches: Sequence[Mapping[str, Any]],
    validation: Any,
    weights: Weights,
    signal: Callable[[], Signal] | None,
    clip_norm: float | None,
) -> Vector:
    model, optimizer = start.copy()
    mixer = Mixer(
        model,
        optimizer,
        weights.names,
        horizon=len(batches),
        signal=signal() if signal else None,
        update=1.0,
        weights=weights.last,
        clip_norm=clip_norm,
    )
    with torch.random.fork_rng(cuda_devices(model.parameters())):
        torch.manual_seed(0)
        for step in batches:
            for name, batch in step.items():
                with mixer.domain(name):
                    loss(model, batch).backward(create_graph=mixer.needs_graph)
            mixer.step()
        with mixer.validation():
            loss(model, validation).backward()
    record = mixer.update()
    return np.array(list(record.scores.values()))


def _train(
    start: _Start,
    loss: Loss,
    batches: Sequence[Mapping[str, Any]],
    validation: Any,
    weights: Vector,
    clip_norm: float | None,
) -> float:
    """The validation loss after T plain training steps with fixed weights."""
    model, optimizer = start.copy()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.random.fork_rng(cuda_devices(model.parameters())):
        torch.manual_seed(0)
        for step in batches:
            optimizer.zero_grad()
            for weight, batch in zip(weights, step.values(), strict=True):
                (float(weight) * loss(model, batch)).backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)
            optimizer.step()
        with torch.no_grad():
            return float(loss(model, validation).double())
