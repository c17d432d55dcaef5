"""A run whose losses and gradients are written down beforehand: a method's rule can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import mixwell
from mixwell.signals.probes import Probes

Array = NDArray[np.float64]


@dataclass
class Script:
    """What a run sees.

    Args:
        losses: of each domain in each step, shape ``(steps, m)``; NaN where the domain is not in the step.
        gradients: of each domain in each step, shape ``(steps, m, d)``; zeros by default.
        validation: the validation gradient after each step, shape ``(steps, d)``; those that are due count.
        reference: losses of a reference model, shape ``(steps, m)``.
        parts: of the parts of each domain's batch, shape ``(steps, m, parts, d)``, in place of `gradients`.
        part_rows: rows of each of those parts.
    """

    losses: Array
    gradients: Array | None = None
    validation: Array | None = None
    reference: Array | None = None
    parts: Array | None = None
    part_rows: int = 1

    @classmethod
    def random(cls, seed: int, *, steps: int, domains: int = 3, size: int = 4) -> Script:
        """Losses that fall, and gradients of which some point against the target."""
        random = np.random.default_rng(seed)
        return cls(
            losses=random.uniform(0.5, 2.0, (steps, domains)),
            gradients=random.normal(size=(steps, domains, size)),
            validation=random.normal(size=(steps, size)),
            reference=random.uniform(0.5, 2.0, (steps, domains)),
        )


@dataclass
class Played:
    """What came of a script.

    Args:
        weights: from the initial to the last ones, shape ``(rounds + 1, m)``.
        parameters: before every step and at the end, shape ``(steps + 1, d)``.
        mixer: the mixer.
    """

    weights: Array
    parameters: Array
    mixer: mixwell.Mixer


class Point(torch.nn.Module):
    """A model that is a vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.theta = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))


def names(count: int) -> list[str]:
    return [f"d{j}" for j in range(count)]


def play(
    script: Script,
    signal: mixwell.Signal,
    update: mixwell.Update | float | None,
    *,
    horizon: int = 1,
    weights: Sequence[float] | None = None,
    lr: float = 0.1,
    constraints: Sequence[Any] = (),
    probes: Callable[[Point], Probes] | None = None,
    probabilities: Mapping[str, float] | None = None,
) -> Played:
    """Train a vector by SGD on the script: every loss is linear, with the scripted value and gradient."""
    steps, m = script.losses.shape
    gradients = np.zeros((steps, m, 2)) if script.gradients is None else script.gradients
    size = gradients.shape[-1] if script.parts is None else script.parts.shape[-1]
    model = Point(size)
    absent = np.isnan(script.losses).any(axis=0)
    often = dict(probabilities or {name: 0.5 for name, some in zip(names(m), absent, strict=True) if some})
    mixer = mixwell.Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        names(m),
        budget=steps,
        horizon=horizon,
        signal=signal,
        update=update,
        weights=weights,
        constraints=constraints,
        probes=None if probes is None else probes(model),
    )

    def value(loss: float, gradient: Array) -> torch.Tensor:
        slope = torch.tensor(gradient, dtype=torch.float64) @ model.theta
        return slope - slope.detach() + loss

    path = [model.theta.detach().numpy().copy()]
    for t in range(steps):
        present = [j for j in range(m) if not np.isnan(script.losses[t, j])]
        missing = frozenset(names(m)) - {names(m)[j] for j in present}
        for j in present:
            name = names(m)[j]
            parts = gradients[t, j][None] if script.parts is None else script.parts[t, j]
            rows = None if script.parts is None else script.part_rows
            for part in parts:
                batch = mixwell.DomainBatch(
                    name,
                    count=rows,
                    fraction=1 / len(parts),
                    probability=often.get(name, 1.0),
                    absent=missing,
                )
                with mixer.domain(batch) as scope:
                    loss = value(script.losses[t, j], part)
                    loss.backward()
                    reference = None if script.reference is None else script.reference[t, j]
                    scope.record_loss(loss, reference=reference)
        mixer.step()
        path.append(model.theta.detach().numpy().copy())
        if mixer.validation_due:
            assert script.validation is not None
            with mixer.validation() as scope:
                value(0.0, script.validation[t]).backward()
    return Played(mixer.weights.history, np.stack(path), mixer)
