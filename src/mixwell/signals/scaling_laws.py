"""ADO: how fast each domain's loss falls, by scaling laws ``L(n) = e + a n^-b`` fitted while the model trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, astuple, dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.signals.base import scores_of_weights
from mixwell.signals.checks import require_at_least, require_choice, require_not_negative
from mixwell.signals.losses import LossSignal
from mixwell.signals.probes import Probes
from mixwell.simplex.weights import TINY
from mixwell.typing import Gradients, Vector

Matrix = NDArray[np.float64]
Samples = Literal["all", "domain"]
Credit = Literal["share", "spread"]

EXPONENTS = (0.05, 0.8)
"""The least and the greatest exponent of a law, as in the code of ADO's authors."""
HUBER = 1e-3
"""Errors of the log loss beyond this count by their size and not by its square."""
_GRID, _ZOOMS, _ITERATIONS = 24, 4, 12
# The least loss relative to the greatest, so that logarithms exist.
_LEAST = 1e-9

# Losses are kept as means over bins of n, eight for each doubling of it: their number does not grow with the run.
_BINS_PER_DOUBLING = 8
_BINS = 40 * _BINS_PER_DOUBLING
_LEAST_BINS = 4


@final
@dataclass(eq=False)
class ScalingLaws(LossSignal):
    """Weights by how fast each domain's loss falls: slope x prior x credit, smoothed (ADO).

    A law ``L_j(n) = e_j + a_j n^-b_j`` is fitted to each domain's training losses. At the end of a round of T
    steps, after t steps in all, with prior mu and weights w in the round:

        ``h <- (1 - g1)^T h + (1 - (1 - g1)^T) w``   (how much of the data was of each domain lately)

        ``rho_j ~ mu_j h_j^s (-dL_j/dn)``, none below the floor before they are made to sum to one

        ``w <- g2 rho + (1 - g2) mean``,   ``mean <- ((t - T) mean + T rho) / t``

    h and the mean begin at the prior. The scores are ``-log w``, for the update :class:`mixwell.SoftmaxWeights`.
    At T = 1 this is the published rule. A longer round does to h and to the mean what T steps would, with the rho
    of its end.

    Until there are laws the weights stay. A domain with too few losses for a law keeps its prior's part of rho;
    where no loss falls, rho is the prior.

    Args:
        prior: mu by domain, normalized; ``None`` for the initial weights.
        samples: what n counts: ``"all"`` samples that were trained on (in batches; the same for every domain, as
            in the authors' code), or those of the ``"domain"`` (its rows; its batches where only mean losses are
            recorded).
        credit: ``"share"``, ``h^s`` as in the paper, or ``"spread"``, ``(h (1 - h))^s`` as in the authors' code.
        credit_power: s.
        credit_rate: g1.
        preference_share: g2.
        floor: the least rho.
        ignore: the number of first steps with losses that are not fitted.
        refit_every: steps, in addition to those, between fits; the laws are fitted at the end of a round.
        warmup: the mixer's warmup, steps that count in t and in ``"all"`` samples although they are not seen.

    References:
        Jiang, Zhou, Feng, Malladi, Kolter: Adaptive data optimization, dynamic sample selection with scaling laws
        (2024).
    """

    prior: Mapping[str, float] | None = None
    _: KW_ONLY
    samples: Samples = "all"
    credit: Credit = "share"
    credit_power: float = 0.5
    credit_rate: float = 0.1
    preference_share: float = 0.1
    floor: float = 0.01
    ignore: int = 0
    refit_every: int = 1
    warmup: int = 0

    _saved = (
        *("_begun", "_steps", "_round_steps", "_since_fit"),
        *("_weights", "_mu", "_recent", "_mean", "_n", "_bins", "_laws"),
    )

    def __post_init__(self) -> None:
        require_not_negative(credit_power=self.credit_power, floor=self.floor)
        for name in ("credit_rate", "preference_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        require_at_least(0, ignore=self.ignore, warmup=self.warmup)
        require_at_least(1, refit_every=self.refit_every)
        require_choice(Samples, samples=self.samples)
        require_choice(Credit, credit=self.credit)
        wrong = {name: value for name, value in (self.prior or {}).items() if not 0 < value < np.inf}
        if wrong:
            raise ValueError(f"the prior must be positive and finite, got {wrong}")

    @property
    def laws(self) -> dict[str, PowerLaw]:
        """The last fitted laws, by domain, where there is one."""
        found = zip(self._domains, self._laws.tolist(), strict=True)
        return {name: PowerLaw(*law) for name, law in found if not np.isnan(law).any()}

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        domains = self._domains
        if self.prior is not None and set(self.prior) != set(domains):
            raise ValueError(
                f"the prior must name every domain once ({', '.join(domains)}); it names {', '.join(self.prior)}"
            )
        super()._attach(optimizer, probes)
        count = len(domains)
        self._begun, self._steps, self._round_steps, self._since_fit = False, 0, 0, 0
        self._weights, self._mu, self._recent, self._mean = (np.full(count, 1 / count) for _ in range(4))
        self._rows, self._n = np.zeros(count), np.zeros(count)
        self._bins = np.zeros((3, count, _BINS))  # by bin: losses, the sum of log n, the sum of losses
        self._laws = np.full((count, 3), np.nan)

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights
        self._round_steps = 0
        if not self._begun:
            given = weights if self.prior is None else np.array([self.prior[name] for name in self._domains])
            self._mu[:] = given / given.sum()
            self._recent[:] = self._mean[:] = self._mu
            self._begun = True

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        super().begin_step(remaining=remaining, interval=interval)
        self._rows[:] = 0

    @override
    def record_loss(
        self, domain: int, losses: Tensor, *, fraction: float, reference: Tensor | None = None
    ) -> None:
        super().record_loss(domain, losses, fraction=fraction)
        self._rows[domain] += len(losses) if losses.dim() else fraction

    @override
    def _take(self, losses: Vector) -> None:
        present = np.flatnonzero(~np.isnan(losses))
        if (losses[present] < 0).any():
            wrong = {self._domains[j]: float(losses[j]) for j in present if losses[j] < 0}
            raise ValueError(f"scaling laws need losses that are not negative, got {wrong}")
        self._steps += 1
        self._round_steps += 1
        if self.samples == "all":
            self._n[:] = self.warmup + self._steps
        else:
            self._n += self._mean_over_ranks(self._rows)
        self._rows[:] = 0
        if self._steps > self.ignore:
            self._since_fit += 1
            log_n = np.log(self._n[present])
            places = np.clip(log_n / np.log(2) * _BINS_PER_DOUBLING, 0, _BINS - 1).astype(np.int64)
            self._bins[:, present, places] += np.stack([np.ones(len(present)), log_n, losses[present]])

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        kept = (1 - self.credit_rate) ** self._round_steps
        self._recent[:] = kept * self._recent + (1 - kept) * self._weights
        if self._since_fit >= self.refit_every:
            self._fit()
        if np.isnan(self._laws).any(axis=1).all():
            return -np.log(self._weights)
        preferred = self._preferred()
        new = self.preference_share * preferred + (1 - self.preference_share) * self._mean
        part = self._round_steps / max(self.warmup + self._steps, 1)
        self._mean[:] = (1 - part) * self._mean + part * preferred
        return scores_of_weights(new)

    def _fit(self) -> None:
        for place, (counts, log_n, losses) in enumerate(self._bins.transpose(1, 0, 2)):
            seen = counts > 0
            if seen.sum() >= _LEAST_BINS:
                each = counts[seen]
                law = fit_power_law(np.exp(log_n[seen] / each), losses[seen] / each, each)
                self._laws[place] = astuple(law)
        self._since_fit = 0

    def _preferred(self) -> Vector:
        """Return rho, which sums to one."""
        recent = self._recent * (1 - self._recent) if self.credit == "spread" else self._recent
        known = ~np.isnan(self._laws).any(axis=1)
        slopes = [PowerLaw(*law).slope(n) for law, n in zip(self._laws[known], self._n[known], strict=True)]
        wanted = self._mu.copy()
        falling = self._mu[known] * np.maximum(recent[known], 0) ** self.credit_power * np.array(slopes)
        if falling.sum() > 0:
            wanted[known] = falling / falling.sum() * self._mu[known].sum()
        raised = np.maximum(wanted, self.floor)
        return raised / raised.sum()


@final
@dataclass(frozen=True)
class PowerLaw:
    """``L(n) = irreducible + scale * n ** -exponent``.

    Args:
        irreducible: the loss that stays, not negative.
        scale: of what can be learned, not negative.
    """

    irreducible: float
    scale: float
    exponent: float

    def slope(self, n: float) -> float:
        """Return ``-dL/dn``, how much one more sample lowers the loss."""
        return self.exponent * self.scale * n ** (-self.exponent - 1)


def fit_power_law(n: Vector, losses: Vector, counts: Vector) -> PowerLaw:
    """Return the law with the least Huber loss of ``log L(n) - log losses``.

    For a given exponent the law is linear in the other two. They are found by Gauss-Newton steps, each a
    least squares problem with two unknowns that are not negative (in closed form) and with weights that make it
    Huber's. The exponent is searched on a grid, and on finer ones around the best.

    Args:
        n: samples, positive, shape ``(points,)``.
        losses: at these, not negative, shape ``(points,)``.
        counts: how often each point counts, shape ``(points,)``.

    Example:
        >>> n = np.geomspace(10, 10_000, 30)
        >>> law = fit_power_law(n, 2 + 5 * n**-0.3, np.ones(30))
        >>> round(law.irreducible, 2), round(law.scale, 2), round(law.exponent, 2)
        (2.0, 5.0, 0.3)
    """
    low, high = EXPONENTS
    unit = float(losses.max())
    if not unit:
        return PowerLaw(0.0, 0.0, low)
    center = float(np.log(n).mean())  # in units of the middle, so that no power is too large or too small
    log_n, log_losses = np.log(n) - center, np.log(np.maximum(losses / unit, _LEAST))
    best = 0
    irreducible = scale = exponents = np.zeros(1)
    for _ in range(_ZOOMS):
        exponents = np.linspace(low, high, _GRID)
        irreducible, scale, errors = _fit_linear(np.exp(-exponents[:, None] * log_n), log_losses, counts)
        best = int(errors.argmin())
        low, high = exponents[max(best - 1, 0)], exponents[min(best + 1, _GRID - 1)]
    exponent = float(exponents[best])
    whole = unit * float(scale[best]) * float(np.exp(exponent * center))
    return PowerLaw(unit * float(irreducible[best]), whole, exponent)


def _fit_linear(powers: Matrix, log_losses: Vector, counts: Vector) -> tuple[Vector, Vector, Vector]:
    """Return, for each row of powers ``n^-b``, the best irreducible loss and scale, and their error."""
    near = np.broadcast_to(np.exp(log_losses), powers.shape)
    irreducible, scale = _not_negative(powers, near, counts / near**2)
    best = irreducible, scale, _error(irreducible, scale, powers, log_losses, counts)
    for _ in range(_ITERATIONS):
        near = np.maximum(irreducible[:, None] + scale[:, None] * powers, _LEAST)
        away = log_losses - np.log(near)
        huber = np.minimum(1, HUBER / np.maximum(np.abs(away), TINY))
        # log(e + a x) is near to log(near) + (e + a x - near) / near, which is linear in e and a.
        irreducible, scale = _not_negative(powers, near * (1 + away), counts * huber / near**2)
        error = _error(irreducible, scale, powers, log_losses, counts)
        better = error < best[2]
        best = (
            np.where(better, irreducible, best[0]),
            np.where(better, scale, best[1]),
            np.where(better, error, best[2]),
        )
    return best


def _not_negative(x: Matrix, y: Matrix, weights: Matrix) -> tuple[Vector, Vector]:
    """Return ``e`` and ``a``, not negative, of the weighted least squares line ``y = e + a x``, for each row."""
    total = weights.sum(axis=1)
    mean_x, mean_y = (weights * x).sum(axis=1) / total, (weights * y).sum(axis=1) / total
    apart = x - mean_x[:, None]
    slope = (weights * apart * y).sum(axis=1) / np.maximum((weights * apart**2).sum(axis=1), TINY)
    cut = mean_y - slope * mean_x
    through_zero = (weights * x * y).sum(axis=1) / (weights * x**2).sum(axis=1)
    slope, cut = np.where(cut < 0, through_zero, slope), np.maximum(cut, 0)
    falls = slope > 0
    return np.where(falls, cut, np.maximum(mean_y, 0)), np.where(falls, slope, 0.0)


def _error(irreducible: Vector, scale: Vector, powers: Matrix, log_losses: Vector, counts: Vector) -> Vector:
    """Return the Huber loss of the log losses, for each row."""
    law = np.maximum(irreducible[:, None] + scale[:, None] * powers, _LEAST)
    size = np.abs(np.log(law) - log_losses)
    each = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return (counts * each).sum(axis=1)
