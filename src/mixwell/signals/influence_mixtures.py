"""TiKMiX's two solvers, from the influence of domains on tasks to a mixture (NumPy only).

``S[i, j]`` is the influence of domain j on task i, larger is better, and ``P = S w`` that of a mixture w. Both
solvers minimize ``std(Phat) - sum(Phat) - entropy(w)``, with ``Phat_i = P_i / (max_j S_ij + 1e-8)``: much
influence, the same for all tasks, from many domains.

Rows of S are first divided by their largest absolute entry, which makes a difference for the 1e-8 only. Where no
domain helps a task (``max_j S_ij <= 0``) its row is divided by that entry alone; the published formula would
turn its sign, and prefer what harms most.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixwell.typing import Vector

Matrix = NDArray[np.float64]

EPSILON = 1e-8
"""Added to the largest influence of a row."""
KINK = 1e-12
"""Added under the root of the variance, which has no derivative at zero."""
LEAST = 1e-12
"""No weight is less while the solver works, so that its logarithm is finite."""
TOLERANCE = 1e-6
"""By how much a task may lose of its influence, in units of the row's largest, and the objective be worse."""
FACTOR = 2.0
"""TiKMiX-M multiplies or divides no weight of the prior by more."""
CONCENTRATIONS, DRAWS, TOP = np.geomspace(20.0, 2000.0, 12), 1000, 32
"""Of the search of TiKMiX-M: ``a_t`` of each round, its draws, and the k best that are averaged."""

_MISSING = "{what} needs {package}, which is not installed: pip install 'mixwell[search]'"


def normalized(influence: Matrix) -> Matrix:
    """Return the matrix A with ``Phat = A w``, shape ``(tasks, m)``, from finite S.

    Example:
        >>> normalized(np.array([[4.0, -2.0], [-1.0, -2.0]])).round(3).tolist()
        [[1.0, -0.5], [-0.5, -1.0]]
    """
    if influence.ndim != 2 or not influence.size or not np.isfinite(influence).all():
        raise ValueError(f"the influence must be finite numbers by task and domain; got {influence.tolist()}")
    sizes = _sizes(influence)
    rows = influence / sizes
    return rows / _best(rows)


def units(influence: Matrix) -> Vector:
    """Return the positive divisors of the influence P in Phat, shape ``(tasks,)``."""
    sizes = _sizes(influence)
    return (sizes * _best(influence / sizes))[:, 0]


def objective(hats: Matrix, weights: Matrix) -> Vector:
    """Return ``std(Phat) - sum(Phat) - entropy(w)`` of mixtures; less is better.

    Args:
        hats: Phat of each, shape ``(n, tasks)``.
        weights: each on the simplex, shape ``(n, m)``.
    """
    entropy = -(weights * np.log(np.maximum(weights, LEAST))).sum(axis=1)
    return hats.std(axis=1) - hats.sum(axis=1) - entropy


def direct_mixture(influence: Matrix, prior: Vector) -> Vector:
    """Return the mixture of TiKMiX-D: the minimizer with no less influence on any task than the prior.

    ``min_w std(Phat) - sum(Phat) - entropy(w)`` subject to ``S w >= S w_prior``, which is convex; by SLSQP
    from uniform weights, or from the prior where that fails. A result that is not feasible, not finite or no
    better than the prior, which is always feasible, is not used.

    Args:
        influence: S, finite, shape ``(tasks, m)``.
        prior: the mixture to be no worse than, on the simplex, shape ``(m,)``.

    Returns:
        On the simplex, shape ``(m,)``.

    Raises:
        ValueError: scipy is not installed.
    """
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise ValueError(_MISSING.format(what="TiKMiX-D", package="scipy")) from error
    matrix = normalized(influence)
    floor = matrix @ prior

    def value(weights: Vector) -> tuple[float, Vector]:
        weights = np.maximum(weights, LEAST)
        hats = matrix @ weights
        centered = hats - hats.mean()
        deviation = math.sqrt(float((centered**2).mean()) + KINK)
        logs = np.log(weights)
        slope = matrix.T @ (centered / (len(hats) * deviation)) - matrix.sum(axis=0) + logs + 1
        return deviation - float(hats.sum()) + float((weights * logs).sum()), slope

    constraints: list[dict[str, Any]] = [
        {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones_like(w)},
        {"type": "ineq", "fun": lambda w: matrix @ w - floor, "jac": lambda w: matrix},
    ]
    best, least = prior, _one(matrix, prior)
    for start in (np.full_like(prior, 1 / len(prior)), prior):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter(
                "ignore"
            )  # SLSQP warns of steps outside the bounds; the result is checked below
            result = minimize(
                value,
                start,
                jac=True,
                method="SLSQP",
                bounds=[(LEAST, 1.0)] * len(prior),
                constraints=constraints,
                options={"maxiter": 500, "ftol": 1e-12},
            )
        found = np.asarray(result.x, dtype=np.float64)
        if not (np.isfinite(found).all() and found.max() > 0):
            continue
        weights = np.maximum(found, 0) / np.maximum(found, 0).sum()
        allowed = bool((matrix @ weights >= floor - TOLERANCE).all())
        if allowed and _one(matrix, weights) < least:
            best, least = weights, _one(matrix, weights)
            if result.success:
                break
    return best.copy()


def latin_hypercube(prior: Vector, count: int, random: np.random.Generator) -> Matrix:
    """Return mixtures around a prior, every weight times 1/2 to 2 by a Latin hypercube, shape ``(count, m)``."""
    # In every dimension each of `count` intervals has one point.
    places = np.stack([random.permutation(count) for _ in prior], axis=1) + random.random((count, len(prior)))
    mixtures = prior * FACTOR ** (2 * places / count - 1)
    return mixtures / mixtures.sum(axis=1, keepdims=True)


def fit_trees(mixtures: Matrix, measured: Matrix, *, seed: int = 0) -> Callable[[Matrix], Matrix]:
    """Fit boosted trees (LightGBM) that predict the influence of a mixture on every task.

    Args:
        mixtures: measured ones, shape ``(n, m)``.
        measured: their influence, shape ``(n, tasks)``.

    Raises:
        ValueError: LightGBM is not installed.
    """
    try:
        import lightgbm
    except ImportError as error:
        raise ValueError(_MISSING.format(what="TiKMiX-M", package="lightgbm")) from error
    settings: dict[str, Any] = {
        "objective": "regression",
        "learning_rate": 0.05,
        "num_leaves": 15,
        "min_data_in_leaf": max(2, len(mixtures) // 20),
        "min_data_in_bin": 1,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    # Trees see numbers of the size of one, whatever the units of the influence.
    center = measured.mean(axis=0)
    size = np.abs(measured - center).max(axis=0)
    scaled = (measured - center) / np.where(size > 0, size, 1.0)
    models = [
        lightgbm.train(settings, lightgbm.Dataset(mixtures, label=column), num_boost_round=200)
        for column in scaled.T
    ]

    def predict(points: Matrix) -> Matrix:
        columns = [np.asarray(model.predict(points), dtype=np.float64) for model in models]
        return np.stack(columns, axis=1) * size + center

    return predict


def annealed_mixture(cost: Callable[[Matrix], Vector], prior: Vector, random: np.random.Generator) -> Vector:
    """Return the mixture of TiKMiX-M: draws around the best so far, closer and closer; the best are averaged.

    ``w <- mean of the top k of Dirichlet(a_t w)``, with ``a_t`` growing geometrically (:data:`CONCENTRATIONS`).
    Draws are cut to between half and twice the prior, where the regression has seen mixtures. Where the end is no
    better than the prior, that stays.

    Args:
        cost: of mixtures, each a row; less is better.
        prior: where to start, on the simplex, shape ``(m,)``.

    Returns:
        On the simplex, shape ``(m,)``.
    """
    best = prior.copy()
    for a in CONCENTRATIONS:
        points = random.dirichlet(np.maximum(a * best, LEAST), size=DRAWS)
        points = np.clip(points, prior / FACTOR, prior * FACTOR)
        points /= points.sum(axis=1, keepdims=True)
        best = points[np.argsort(cost(points), kind="stable")[:TOP]].mean(axis=0)
    before, after = cost(np.stack([prior, best]))
    return best if after < before else prior.copy()


def _sizes(influence: Matrix) -> Matrix:
    sizes = np.abs(influence).max(axis=1, keepdims=True)
    return np.where(sizes > 0, sizes, 1.0)


def _best(rows: Matrix) -> Matrix:
    best = rows.max(axis=1, keepdims=True)
    return np.where(best > 0, best, 1.0) + EPSILON


def _one(matrix: Matrix, weights: Vector) -> float:
    return float(objective((matrix @ weights)[None], weights[None])[0])
