"""RegMix: three models of a proxy's loss as a function of its mixture, and the best mixtures by them."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, Literal, cast

import numpy as np

from mixwell.methods.search.mixtures import Matrix, require_fittable
from mixwell.typing import Vector

Model = Literal["linear", "log-linear", "lightgbm"]
Predictor = Callable[[Matrix], Vector]
"""Predicts the losses of mixtures, from shape ``(n, m)`` to shape ``(n,)``."""

ENOUGH_FOR_TREES = 128
"""Proxies from which on trees are the better choice: on the runs that RegMix's authors published (17 domains), the
log-linear model ranks new mixtures better below it, trees above it."""
OFFSET = 1e-3
"""Added to weights before their logarithm is taken, for those that are zero."""
RIDGE = 1e-2
ROUNDS, LEARNING_RATE = 1000, 1e-2


def chosen(model: Model | Literal["auto"], proxies: int) -> Model:
    """Resolve ``auto``: ``lightgbm`` from :data:`ENOUGH_FOR_TREES` proxies on, else ``log-linear``."""
    if model != "auto":
        return model
    return "lightgbm" if proxies >= ENOUGH_FOR_TREES else "log-linear"


def expect_installed(model: Model) -> None:
    """Raise ``ValueError`` where the package of a model cannot be imported."""
    if model == "lightgbm":
        try:
            import lightgbm  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except (ImportError, OSError) as error:  # OSError: it is there, but a library that it links to is not
            raise ValueError(
                f"lightgbm cannot be imported ({error}); install it (pip install 'mixwell[search]'), or set model "
                "to log-linear"
            ) from error


def fit(model: Model, weights: Matrix, losses: Vector, *, seed: int = 0) -> Predictor:
    """Fit a model to proxies' weights, shape ``(n, m)``, and losses, shape ``(n,)``.

    Example:
        >>> weights = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
        >>> predict = fit("linear", weights, np.array([1.0, 2.0, 3.0]))
        >>> predict(np.array([[0.25, 0.75]])).round(6).tolist()
        [2.5]
    """
    require_fittable(weights, losses)
    match model:
        case "linear":
            return _linear(weights, losses)
        case "log-linear":
            return _log_linear(weights, losses)
        case "lightgbm":
            return _lightgbm(weights, losses, seed)


def best_average(predict: Predictor, samples: Matrix, top: int) -> Vector:
    """Return the average of the ``top`` samples, shape ``(n, m)``, with the least predicted losses.

    Raises:
        ValueError: the model predicts the same loss for all, or ``top`` is not between 1 and n.
    """
    if not 1 <= top <= len(samples):
        raise ValueError(f"top must be between 1 and the {len(samples)} samples, got {top}")
    predicted = predict(samples)
    if np.ptp(predicted) == 0:
        raise ValueError(
            f"the model predicts {predicted[0]:.6g} for every mixture, so none is better than another; train more "
            "proxies, longer, or choose another model"
        )
    best = np.argsort(predicted, kind="stable")[:top]  # trees predict many ties
    average = samples[best].mean(axis=0)
    return average / average.sum()


def _linear(weights: Matrix, losses: Vector) -> Predictor:
    """Least squares with an intercept; the shortest of the solutions (weights sum to one, so there are many)."""

    def features(weights: Matrix) -> Matrix:
        return np.column_stack([np.ones(len(weights)), weights])

    coefficients = np.linalg.lstsq(features(weights), losses, rcond=None)[0]
    return lambda weights: features(weights) @ coefficients


def _log_linear(weights: Matrix, losses: Vector) -> Predictor:
    """Ridge regression on ``[w, log(w + 1e-3)]``: returns diminish, and the first rows of a domain count most."""

    def features(weights: Matrix) -> Matrix:
        return np.column_stack([weights, np.log(weights + OFFSET)])

    # The intercept is not shrunk, so that adding a constant to all losses changes no proposal.
    design = features(weights)
    center, level = design.mean(axis=0), losses.mean()
    design = design - center
    penalty = RIDGE * np.eye(design.shape[1])
    coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ (losses - level))
    return lambda weights: (features(weights) - center) @ coefficients + level


def _lightgbm(weights: Matrix, losses: Vector, seed: int) -> Predictor:
    """Boosted trees with the paper's settings and number of rounds, without early stopping."""
    import lightgbm

    # LightGBM's own least leaf is 20 rows, which a few dozen proxies could not split at all.
    leaf = min(20, isqrt(len(losses)))
    settings: dict[str, Any] = {
        "objective": "regression",
        "learning_rate": LEARNING_RATE,
        "min_data_in_leaf": leaf,
        "min_data_in_bin": 3 if leaf >= 3 else 1,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbose": -1,
    }
    data = lightgbm.Dataset(weights, label=losses, params=settings)
    booster = lightgbm.train(settings, data, num_boost_round=ROUNDS)
    return lambda weights: np.asarray(cast("Any", booster.predict(weights, num_threads=1)), dtype=np.float64)
