"""The paper's motivating example: two quadratics, where updating the weights at every step fails.

``l_1 = theta^2 / 2``, ``l_2 = (theta - 1)^2 / 2``, ``L_V = theta^2 / 2``, so all weight belongs to the first
domain. Training starts at ``theta_0 = -R`` with equal weights. Far to the left of both minima the second
domain pulls harder to the right, so a greedy update (T = 1) gives it the weight; a horizon that sees the
minimum does not (Sec. "Motivating Example" and appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from mixwell.mixer.mixer import Mixer
from mixwell.signals import Hypergradient
from mixwell.simplex.rounds import RoundClock
from mixwell.typing import Vector

GOOD, BAD = "target", "other"


@final
@dataclass(frozen=True)
class QuadraticSettings:
    """One instance of the example.

    Args:
        radius: R, the distance of the start from the optimum.
        step_size: alpha of the weights.
        learning_rate: eta of the model.
        budget: N, training steps.

    Raises:
        ValueError: A number is out of range.
    """

    radius: float
    step_size: float
    learning_rate: float = 0.1
    budget: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"the learning rate must be between 0 and 1, got {self.learning_rate}")
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"the radius must be positive, got {self.radius}")
        if not (math.isfinite(self.step_size) and self.step_size > 0):
            raise ValueError(f"the step size must be positive, got {self.step_size}")
        if self.budget < 1:
            raise ValueError(f"the budget must be at least 1 step, got {self.budget}")


@final
@dataclass(frozen=True)
class Trajectory:
    """Parameter and weight over one run.

    Args:
        steps: training steps at the start and after every round, shape ``(K + 1,)``.
        theta: the parameter at these steps.
        phi: ``log(w / (1 - w))`` at these steps, where w is the weight of the right domain.
    """

    steps: Vector
    theta: Vector
    phi: Vector

    @property
    def weight(self) -> Vector:
        """The weight of the right domain after every round."""
        return np.exp(-np.logaddexp(0.0, -self.phi))


@final
@dataclass(frozen=True)
class Claim:
    """One case of the theorem, checked.

    Args:
        text: the claim and the measurement.
        holds: whether they agree; ``None`` where the theorem claims nothing.
    """

    text: str
    holds: bool | None


@cache
def run(setting: QuadraticSettings, horizon: int) -> Trajectory:
    """Run the example with a mixer: Algorithm 2 with the exact Hessian, which is 1."""
    model, parameter = nn.Module(), nn.Parameter(torch.tensor(-setting.radius, dtype=torch.float64))
    model.register_parameter("theta", parameter)

    def loss(center: float) -> Tensor:
        return (parameter - center) ** 2 / 2

    mixer = Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=setting.learning_rate),
        [GOOD, BAD],
        budget=setting.budget,
        horizon=horizon,
        signal=Hypergradient(curvature=1.0, points=1, trace_every=1),
        update=setting.step_size,
    )
    steps, theta, phi = [0], [-float(setting.radius)], [0.0]
    for _ in range(setting.budget):
        for domain, center in ((GOOD, 0.0), (BAD, 1.0)):
            with mixer.domain(domain):
                loss(center).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                loss(0.0).backward()
            log = mixer.weights.log
            steps.append(mixer.steps_done)
            theta.append(float(parameter.detach()))
            phi.append(float(log[0] - log[1]))
    return Trajectory(np.array(steps, dtype=np.float64), np.array(theta), np.array(phi))


def recursion(setting: QuadraticSettings, horizon: int) -> Trajectory:
    """Compute the same with the paper's closed recursion (appendix A).

    ``theta <- r theta + (1 - w)(1 - r)`` and ``phi <- phi + alpha theta (1 - r)`` with ``r = (1 - eta)^T``, T the
    length of the round.
    """
    clock = RoundClock(horizon, budget=setting.budget, warmup=0)
    steps, theta, phi = [0], [-float(setting.radius)], [0.0]
    while clock.steps_done < setting.budget:
        ratio = (1 - setting.learning_rate) ** clock.round_length
        other = math.exp(-float(np.logaddexp(0.0, phi[-1])))
        theta.append(ratio * theta[-1] + other * (1 - ratio))
        phi.append(phi[-1] + setting.step_size * theta[-1] * (1 - ratio))
        clock.steps_done += clock.round_length
        clock.next_round()
        steps.append(clock.steps_done)
    return Trajectory(np.array(steps, dtype=np.float64), np.array(theta), np.array(phi))


def deviation(measured: Trajectory, expected: Trajectory) -> float:
    """Return the largest difference of phi, relative to the largest phi (or 1)."""
    return float(np.abs(measured.phi - expected.phi).max() / max(1.0, np.abs(expected.phi).max()))


def failure_radius(setting: QuadraticSettings) -> float:
    """Return ``eta N / ((1 - eta)(1 - (1 - eta)^N))``, beyond which T = 1 ends with the wrong weights."""
    eta, n = setting.learning_rate, setting.budget
    return eta * n / ((1 - eta) * (1 - (1 - eta) ** n))


def safe_horizon(setting: QuadraticSettings, *, margin: float) -> int:
    """Return the theorem's horizon ``ceil((c + 1) log(2R + 1) / log(1 / (1 - eta)))`` with ``c = margin``.

    Raises:
        ValueError: c is not positive, or the horizon is more than a float can hold.
    """
    if not margin > 0:
        raise ValueError(f"the theorem's c must be positive, got {margin}")
    eta, radius = setting.learning_rate, setting.radius
    horizon = (margin + 1) * math.log(2 * radius + 1) / -math.log1p(-eta)
    if not math.isfinite(horizon):
        raise ValueError(
            f"the theorem's horizon is not finite for c = {margin:g} and R = {radius:g}; lower them"
        )
    return math.ceil(horizon)


def check_theorem(setting: QuadraticSettings, *, margin: float) -> list[Claim]:
    """Check both cases of the theorem of appendix A: T = 1 fails, and a long horizon succeeds.

    Args:
        margin: the theorem's c.
    """
    limit, horizon = failure_radius(setting), safe_horizon(setting, margin=margin)
    if setting.radius <= limit:
        return [
            Claim(f"T=1: no claim, R={setting.radius:g} is within {limit:.4g}", None),
            Claim(f"T={horizon}: no claim, R={setting.radius:g} is within the theorem's radius", None),
        ]
    phi = float(run(setting, 1).phi[-1])
    greedy = Claim(
        f"T=1: w < 1/2 is claimed, as R={setting.radius:g} > {limit:.4g}; measured log-odds {phi:.4f}",
        phi < 0,
    )
    if horizon > setting.budget:
        text = f"T={horizon}: no claim, the horizon exceeds the budget of {setting.budget}"
        return [greedy, Claim(text, None)]
    rounds = setting.budget // horizon
    base = 2 * setting.radius + 1
    beta = (1 - base**-margin) * (1 - base ** (-rounds * (margin + 1)))
    bound = beta * setting.step_size / 2
    phi = float(run(setting, horizon).phi[rounds])
    text = f"T={horizon}: log-odds >= {bound:.4f} is claimed (c={margin:g}, K={rounds}); measured {phi:.4f}"
    return [greedy, Claim(text, phi >= bound)]


def pairs_to_run(
    settings: Sequence[QuadraticSettings], horizons: Sequence[int]
) -> list[tuple[QuadraticSettings, int]]:
    """Return the settings with each horizon that is within the budget.

    Raises:
        ValueError: No horizon fits a budget.
    """
    pairs = [(s, t) for s in settings for t in sorted(set(horizons)) if 1 <= t <= s.budget]
    if not pairs:
        raise ValueError(f"no horizon of {sorted(set(horizons))} is between 1 and the budget")
    return pairs
