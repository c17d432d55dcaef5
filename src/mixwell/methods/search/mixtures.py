"""Proxies on many mixtures, for RegMix and Data Mixing Laws: which mixtures, their losses, what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixwell.methods.base import MethodContext, Stages, Trial
from mixwell.methods.proxies import MixtureSearchOptions, fixed_weights
from mixwell.typing import Vector

Matrix = NDArray[np.float64]
Propose = Callable[[np.random.Generator, Matrix, Vector], Vector]
"""From mixtures of proxies, shape ``(n, m)``, and their losses, shape ``(n,)``, to a mixture, shape ``(m,)``."""

STRENGTHS: tuple[float, ...] = tuple(float(s) for s in np.geomspace(0.1, 5.0, 15))
"""Of RegMix's Dirichlet distributions: weak ones give mixtures of a domain or two, strong ones even mixtures."""
POOL = 100
"""Candidates that are drawn for every mixture that is kept."""
DRAWS = 20
"""How often such a pool is drawn before the search for different mixtures stops."""
FLOOR = 1e-6
"""The least weight of a proposal: none may be zero, and so little trains nothing."""


def data_shares(context: MethodContext) -> Vector:
    """Return the domains' shares of all rows, shape ``(m,)``."""
    shares = np.array([context.rows[name] for name in context.domains], dtype=np.float64)
    return shares / shares.sum()


def search_mixture(
    context: MethodContext, propose: Propose, *, strengths: Sequence[float] = STRENGTHS
) -> Stages:
    """Train a proxy on each of many mixtures, all at once, and keep the mixture that is proposed.

    Raises:
        ValueError: the loss of a proxy is not finite, so nothing can be fitted.
    """
    options = context.options_as(MixtureSearchOptions)
    rng = np.random.default_rng(context.seed)
    tried = candidates(
        data_shares(context),
        options.proxies,
        rng,
        strengths=strengths,
        repeats=options.repeats,
        least=options.least,
    )
    trials: list[Trial] = []
    for number, mixture in enumerate(tried.tolist()):
        weights = {name: w for name, w in zip(context.domains, mixture, strict=True) if w > 0}
        trials.append(
            Trial(
                f"mixture-{number:03d}",
                fixed_weights(weights),
                steps=options.steps(context),
                model=options.proxy_model,
                domains=tuple(weights),
            )
        )
    outcomes = yield trials
    losses = np.array([one.loss for one in outcomes], dtype=np.float64)
    named = zip(trials, losses.tolist(), strict=True)
    wrong = [f"{trial.name}: {loss}" for trial, loss in named if not np.isfinite(loss)]
    if wrong:
        raise ValueError(
            f"the validation losses of {len(wrong)} of {len(losses)} proxies are not finite ({', '.join(wrong)}); "
            "lower optimizer.lr, or look at their data"
        )
    return keep_mixture(context.domains, propose(rng, tried, losses))


def keep_mixture(domains: Sequence[str], mixture: Vector) -> Mapping[str, Any]:
    """Return settings of the mixer that keep a mixture; weights below :data:`FLOOR` are raised to it."""
    raised = np.maximum(mixture, FLOOR)
    return fixed_weights(dict(zip(domains, (raised / raised.sum()).tolist(), strict=True)))


def candidates(
    shares: Vector,
    count: int,
    rng: np.random.Generator,
    *,
    strengths: Sequence[float] = STRENGTHS,
    power: float = 0.5,
    repeats: float = 15.0,
    least: float = 2e-4,
) -> Matrix:
    """Return different mixtures around the domains' shares of the data.

    ``w ~ Dirichlet(s p)`` with ``p_j ~ share_j^power`` and a strength ``s`` that is drawn for each. A mixture with
    ``w_j > repeats * share_j`` is dropped, since training would repeat that domain too often; weights below
    ``least`` become zero; mixtures that agree to within ``least`` are one (RegMix, Liu et al. 2024).

    Args:
        shares: of the domains in all data, positive; divided by their sum. Shape ``(m,)``.
        strengths: from which each mixture draws its own.
        power: below one it brings the shares nearer to each other.
        repeats: how many times its share a domain may get, at least 1.
        least: a smaller weight becomes zero.

    Returns:
        Shape ``(count, m)``; rows sum to one and may have zeros.

    Raises:
        ValueError: a share or setting does not fit, or there are not enough different mixtures.

    Example:
        >>> found = candidates(np.array([0.6, 0.3, 0.1]), 4, np.random.default_rng(0))
        >>> found.shape, bool(np.allclose(found.sum(axis=1), 1))
        ((4, 3), True)
    """
    if not (np.isfinite(shares) & (shares > 0)).all():
        raise ValueError(f"shares must be positive and finite, got {shares.tolist()}")
    if repeats < 1 or not 0 < least < 1 / len(shares):
        raise ValueError(
            f"repeats must be 1 or more and least between 0 and 1/{len(shares)}, got {repeats} and {least}"
        )
    shares = shares / shares.sum()
    prior = shares**power / (shares**power).sum()
    found: dict[bytes, Vector] = {}
    for _ in range(DRAWS):
        sizes = rng.multinomial(POOL * count, np.full(len(strengths), 1 / len(strengths)))
        drawn = np.concatenate([rng.dirichlet(prior * s, n) for s, n in zip(strengths, sizes, strict=True)])
        drawn = drawn[(drawn <= repeats * shares).all(axis=1)]
        drawn[drawn < least] = 0.0
        for one in drawn / drawn.sum(axis=1, keepdims=True):
            found.setdefault(np.round(one / least).astype(np.int64).tobytes(), one)
        if len(found) >= count:
            order = rng.permutation(len(found))[:count]
            return np.stack(list(found.values()))[order]
    raise ValueError(
        f"only {len(found)} different mixtures of {len(shares)} domains were found, {count} are wanted; ask for "
        f"fewer proxies, or allow more repeats than {repeats:g}"
    )


def require_fittable(weights: Matrix, losses: Vector) -> None:
    """Raise ``ValueError`` unless weights, shape ``(n, m)``, and losses, shape ``(n,)``, are finite."""
    if weights.ndim != 2 or losses.shape != weights.shape[:1]:
        raise ValueError(f"expected weights (n, m) and losses (n,), got {weights.shape} and {losses.shape}")
    if not (np.isfinite(weights).all() and np.isfinite(losses).all()):
        raise ValueError("weights and losses must be finite; leave out proxies that diverged")
