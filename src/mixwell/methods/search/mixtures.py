"""The mixtures that proxies are trained on, and their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixwell.methods.base import Outcome, Trial
from mixwell.methods.proxies import fixed_weights
from mixwell.typing import Vector

Matrix = NDArray[np.float64]

STRENGTHS: tuple[float, ...] = tuple(float(s) for s in np.geomspace(0.1, 5.0, 15))
"""Of RegMix's Dirichlet distributions: weak ones give mixtures of a domain or two, strong ones even mixtures."""
POOL = 100
"""Candidates that are drawn for every mixture that is kept."""
DRAWS = 20
"""How often such a pool is drawn before the search for different mixtures stops."""


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
    ``least`` become zero; mixtures that agree to within ``least`` are one (RegMix, Liu et
    al. 2024).

    Args:
        shares: of the domains in all data, positive; divided by their sum. Shape ``(m,)``.
        count: mixtures that are wanted.
        rng: draws them.
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


def trials(
    domains: Sequence[str], mixtures: Matrix, *, steps: int, model: Mapping[str, Any]
) -> tuple[Trial, ...]:
    """Return a trial for each mixture, shape ``(n, m)``; a domain without weight is left out of its run."""
    named = [
        {name: float(w) for name, w in zip(domains, one, strict=True) if w > 0} for one in mixtures.tolist()
    ]
    return tuple(
        Trial(
            name=f"mixture-{number:03d}",
            mixer=fixed_weights(weights),
            steps=steps,
            model=model,
            domains=tuple(weights),
        )
        for number, weights in enumerate(named)
    )


def losses(planned: Sequence[Trial], outcomes: Sequence[Outcome]) -> Vector:
    """Return the validation losses of proxies, shape ``(n,)``.

    Raises:
        ValueError: one is not finite, so nothing can be fitted.
    """
    found = np.array([one.loss for one in outcomes], dtype=np.float64)
    wrong = [
        f"{trial.name}: {loss}"
        for trial, loss in zip(planned, found.tolist(), strict=True)
        if not np.isfinite(loss)
    ]
    if wrong:
        raise ValueError(
            f"the validation losses of {len(wrong)} of {len(found)} proxies are not finite ({', '.join(wrong)}); "
            "lower optimizer.lr, or look at their data"
        )
    return found
