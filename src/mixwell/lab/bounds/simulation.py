"""Algorithms 2 and 3 on many rows at once: every horizon of a grid, and several copies of the noise, in one pass.

The mixer takes a fraction of a millisecond per step, too slow for millions of them; a test compares this loop
with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from mixwell.lab.bounds.problems import Array, BilevelProblem, Indices
from mixwell.lab.bounds.shared_quadratics import SharedQuadratics

ROUNDING = 1e-10
Silent: Callable[[int], None] = lambda _: None  # noqa: E731


@final
@dataclass(frozen=True)
class Outcomes:
    """Results by row.

    Args:
        average: ``(w_0 + ... + w_{K-1}) / K``, shape ``(rows, m)``.
        error: the largest ``max_j |h_j - dF/dw_j|`` of a round, shape ``(rows,)``; NaN if not requested.
        error_ratio: the largest ratio of that error to its bound over the rounds, likewise.
    """

    average: Array
    error: Array
    error_ratio: Array


def simulate(
    problem: BilevelProblem,
    *,
    budget: int,
    horizons: Array,
    learning_rates: Array,
    step_sizes: Array,
    curvature: str,
    random: np.random.Generator | None = None,
    error_bounds: Callable[[Indices, Array], Array] | None = None,
    report: Callable[[int], None] = Silent,
) -> Outcomes:
    """Train every row for its ``floor(N / T)`` rounds.

    Args:
        budget: N.
        horizons: T of every row, shape ``(rows,)``.
        learning_rates: eta of every row.
        step_sizes: alpha of every row.
        curvature: a kind of :meth:`BilevelProblem.curvature`.
        random: source of the noise; ``None`` for full gradients.
        error_bounds: bounds of the hypergradients' error, from rows and the distances of their rounds' first
            parameters to the minimizers; ``None`` to skip the errors (they cost an exact hypergradient per
            round).
        report: called now and then with the number of steps done.
    """
    rows = len(horizons)
    horizon = horizons.astype(np.int64)
    rounds = budget // horizon
    theta = np.broadcast_to(problem.start, (rows, problem.dimension)).copy()
    log_weights = np.zeros((rows, problem.domains))
    weights = np.full((rows, problem.domains), 1 / problem.domains)
    total, done = np.zeros_like(weights), np.zeros(rows, dtype=np.int64)
    star = problem.minimizer(weights)
    matrix = problem.curvature(curvature, weights, star).copy()
    distance = np.linalg.norm(theta - star, axis=-1)
    trace = np.zeros((rows, problem.domains, problem.dimension))
    rate, rate3 = learning_rates[:, None], learning_rates[:, None, None]
    error, ratio = np.full(rows, np.nan), np.full(rows, np.nan)
    fixed = curvature == "isotropic"
    for step in range(budget):
        exact = random is None
        gradients = problem.gradients(theta) if exact else problem.noisy_gradients(theta, random)
        trace += gradients - rate3 * (trace @ matrix)
        theta -= rate * np.einsum("bm,bmd->bd", weights, gradients)
        ending = np.flatnonzero((step + 1) % horizon == 0)
        ending = ending[done[ending] < rounds[ending]]
        if step % 1000 == 0:
            report(step)
        if not len(ending):
            continue
        at = theta[ending]
        target = problem.validation_gradient(at) if exact else problem.noisy_validation_gradient(at, random)
        scores = -rate[ending] * np.einsum("bd,bmd->bm", target, trace[ending])
        if error_bounds is not None:
            true = problem.hypergradient(weights[ending], star[ending])
            away = np.abs(scores - true).max(-1)
            away = np.where(away < ROUNDING * np.abs(true).max(-1), 0.0, away)  # the bounds go below that
            error[ending] = np.fmax(error[ending], away)
            ratio[ending] = np.fmax(ratio[ending], away / error_bounds(ending, distance[ending]))
        total[ending] += weights[ending]
        done[ending] += 1
        log_weights[ending] -= step_sizes[ending, None] * scores
        raised = np.exp(log_weights[ending] - log_weights[ending].max(-1, keepdims=True))
        weights[ending] = raised / raised.sum(-1, keepdims=True)
        trace[ending] = 0.0
        if not fixed or error_bounds is not None:
            star[ending] = problem.minimizer(weights[ending], star[ending])
            matrix[ending] = problem.curvature(curvature, weights[ending], star[ending])
            distance[ending] = np.linalg.norm(at - star[ending], axis=-1)
    return Outcomes(total / rounds[:, None], error, ratio)


def leap(
    problem: SharedQuadratics,
    *,
    budget: int,
    horizons: Array,
    learning_rates: Array,
    step_sizes: Array,
    error_bounds: Callable[[Indices, Array], Array],
    report: Callable[[int], None] = Silent,
) -> Outcomes:
    """Compute :func:`simulate` for full gradients and exact curvature, a whole round at a time.

    With one Hessian A, ``y = theta_0 - theta*`` and ``r = I - eta A``, a round ends at ``theta_T = theta* +
    r^T y`` and ``u_j = A (T r^(T-1) y + (1 - r^T) (eta A)^-1 (theta* - c_j))``, so budgets of many millions
    of steps are feasible.
    """
    values, basis = np.linalg.eigh(problem.matrix)
    parts: list[Outcomes] = []
    for row, (horizon, rate, alpha) in enumerate(zip(horizons, learning_rates, step_sizes, strict=True)):
        ratio = 1 - rate * values
        power, slow = ratio**horizon, horizon * ratio ** (horizon - 1)
        theta, log_weights = problem.start[None], np.zeros((1, problem.domains))
        total = np.zeros(problem.domains)
        error = quotient = 0.0
        rounds = int(budget // horizon)
        for index in range(rounds):
            raised = np.exp(log_weights - log_weights.max())
            weights = raised / raised.sum()
            star = problem.minimizer(weights)
            away = theta - star
            total += weights[0]
            traces = (slow * (away @ basis)) * values + ((star - problem.centers) @ basis) * (
                1 - power
            ) / rate
            theta = star + (power * (away @ basis)) @ basis.T
            scores = -rate * (traces @ (basis.T @ problem.validation_gradient(theta)[0]))
            # With one Hessian, H^-1 grad l_j(theta*) is theta* - c_j.
            true = -(star - problem.centers) @ problem.validation_gradient(star)[0]
            wrong = float(np.abs(scores - true).max())
            if wrong > ROUNDING * np.abs(true).max():
                error = max(error, wrong)
                limit = error_bounds(np.array([row]), np.linalg.norm(away, axis=-1))
                quotient = max(quotient, wrong / float(limit[0]))
            log_weights -= alpha * scores
            if index % 1000 == 0:
                report(int(budget * (row + index / rounds) / len(horizons)))
        parts.append(Outcomes(total / rounds, np.array(error), np.array(quotient)))
    return Outcomes(
        np.stack([p.average for p in parts]),
        np.array([p.error for p in parts]),
        np.array([p.error_ratio for p in parts]),
    )
