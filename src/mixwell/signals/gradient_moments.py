"""PiKE: how large the domains' gradients are, and how noisy."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.parameters import inner_products
from mixwell.hypergradient.traces.base import Combined, empty_trace
from mixwell.signals.base import DomainFactors, Requirements, Signal, scores_of_weights
from mixwell.signals.checks import require_at_least, require_not_negative, require_positive
from mixwell.signals.probes import Probes
from mixwell.simplex.weights import normalize
from mixwell.typing import Gradients, Vector

# A domain with less curvature, relative to an upper bound of the minimum, counts as one without.
FLAT = 1e-8
HUGE = 1e300  # in place of infinity, so that quotients are not NaN


@final
@dataclass(frozen=True)
class DescentBound:
    """The constants of PiKE's bound on the loss after a step (its conceptual form).

    With ``beta |g_k|^2 <= <g_k, sum_i g_i>``, ``|sum_k w_k g_k|^2 <= gamma sum_k w_k^2 |g_k|^2`` and an
    L-smooth loss the next mixture minimizes ``sum_k w_k lam_k + w_k^2 kap_k / 2`` with
    ``lam_k = -eta beta G_k + L eta^2 / (2 b) s2_k`` and ``kap_k = L eta^2 gamma G_k``.

    Args:
        smoothness: L.
        beta: how far the gradients help each other; 1 for orthogonal ones.
        gamma: how far they add up; 1 for orthogonal ones, m for equal ones.
        learning_rate: eta; ``None`` for that of the optimizer when the round ends.
    """

    smoothness: float
    beta: float = 1.0
    gamma: float = 1.0
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        require_positive(**{f"{name} of a descent bound": value for name, value in vars(self).items()})


@final
@dataclass(eq=False)
class GradientMoments(Signal, DomainFactors):
    """The size ``G_k`` of every domain's gradient, and the variance ``s2_k`` of the gradient of a row (PiKE).

    A domain's batch comes in k >= 2 parts of ``n_i`` rows, n in all, with gradients ``g_i`` and their mean g
    over rows:

        ``s2_k = sum_i n_i |g_i - g|^2 / (k - 1)``,   ``G_k = |g|^2 - s2_k / n``,

    both without bias for rows drawn independently. They are estimates, so a round takes their *mean* over its
    steps, not their sum. The score is ``-(zeta1 G_k - zeta2 / (2 b) s2_k)``, b rows of a step, for mirror
    descent with step size 1: ``w_k ~ w_k exp(zeta1 G_k - zeta2 / (2 b) s2_k)``. With a `bound` it is ``-log``
    of the mixture that minimizes the bound, for :class:`mixwell.SoftmaxWeights`.

    The balanced variant (`tau`) multiplies the loss of domain k by ``f_k = tau softmax_k(tau L)`` in the
    training step, with the mean losses L of the round before (``tau / m`` before there are any), and its G
    and s2 by the square of the factor that the coming round has.

    A domain that is absent from a round, or only has single rows, counts as the mean of the others.

    Args:
        zeta1: the factor of the size.
        zeta2: the factor of the noise.
        batch_rows: b, the rows of a training step over all domains.
        tau: the temperature of the balanced variant; ``None`` for the plain one.
        unbiased: whether G is without bias; else it is ``|g|^2``, which is larger by ``s2 / n`` on average.
        bound: constants of the conceptual form; ``None`` for the exponential one.

    References:
        Li, Deng, Zhong, Razaviyayn, Mirrokni, "PiKE: Adaptive Data Mixing for Large-Scale Multi-Task Learning
        Under Low Gradient Conflicts" (2025), arXiv:2502.06244.
    """

    zeta1: float
    zeta2: float
    _: KW_ONLY
    batch_rows: int
    tau: float | None = None
    unbiased: bool = True
    bound: DescentBound | None = None

    _saved = ("_whole", "_round", "_factors", "_weights")

    def __post_init__(self) -> None:
        require_not_negative(zeta1=self.zeta1, zeta2=self.zeta2)
        require_at_least(1, batch_rows=self.batch_rows)
        require_positive(tau=self.tau)
        self.requirements = Requirements(validation=False, losses=self.tau is not None, parts=2)

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        distributed.require_single_process(self)
        m = len(self._domains)
        self._optimizer = optimizer
        self._means: dict[int, list[Tensor]] = {}  # of the step, allocated when a domain is first seen
        # Sums over the step, and over the round; the names are views of their rows.
        self._step, self._round = np.zeros((5, m)), np.zeros((5, m))
        self._deviations, self._rows, self._parts, self._step_losses, self._step_fractions = self._step
        self._sizes, self._noises, self._measured, self._losses, self._fractions = self._round
        self._whole = 0
        self._factors = np.full(m, 1.0 if self.tau is None else self.tau / m)
        self._weights = np.full(m, 1 / m)
        self._last = np.full(m, math.nan), np.full(m, math.nan)

    @override
    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        self._weights[:] = weights
        self._round[:] = 0
        self._whole = 0

    @override
    def begin_step(self, *, remaining: int, interval: int) -> None:
        self._step[:] = 0

    @override
    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        if rows is None or rows < 1:
            raise ValueError(
                f"{self!r} measures noise, so it needs the rows of every part of a batch; got {rows}. Give "
                "mixer.domain(name, fraction=..., rows=...), two parts or more for each domain"
            )
        if domain not in self._means:
            self._means[domain] = [empty_trace(parameter) for parameter in self._parameters.tensors]
        mean, before = self._means[domain], float(self._rows[domain])
        if before == 0:
            for buffer in mean:
                buffer.zero_()
        after = before + rows
        # Welford's recursion: a sum of squares less the square of the sum would drown small noise in rounding.
        differences = [
            -buffer if gradient is None else gradient.detach().to(buffer.dtype) - buffer
            for buffer, gradient in zip(mean, gradients, strict=True)
        ]
        self._deviations[domain] += sum(inner_products(differences, differences)) * before * rows / after
        for buffer, difference in zip(mean, differences, strict=True):
            buffer.add_(difference, alpha=rows / after)
        self._rows[domain] = after
        self._parts[domain] += 1

    @override
    def record_loss(
        self, domain: int, losses: Tensor, *, fraction: float, reference: Tensor | None = None
    ) -> None:
        self._step_losses[domain] += fraction * float(losses.double().mean())
        self._step_fractions[domain] += fraction

    @override
    def domain_factor(self, domain: int) -> float:
        """Return ``f_k`` of the balanced variant, 1 otherwise; the same in all steps of a round."""
        return float(self._factors[domain])

    @override
    def end_step(self, combined: Combined) -> None:
        for j in np.flatnonzero(self._parts > 1).tolist():
            noise = float(self._deviations[j]) / (int(self._parts[j]) - 1)
            size = sum(inner_products(self._means[j], self._means[j]))
            self._sizes[j] += size - noise / float(self._rows[j]) if self.unbiased else size
            self._noises[j] += noise
            self._measured[j] += 1
        self._whole += int(((self._parts == 1) & (self._rows > 1)).sum())
        self._losses += self._step_losses
        self._fractions += self._step_fractions

    @override
    def scores(self, validation: Gradients | None) -> Vector:
        if not self._measured.any() and self._whole:
            raise ValueError(
                f"{self!r} measures noise between the parts of a domain's batch, and every batch of this "
                "round came in one part: enter mixer.domain(name, fraction=1/2, rows=...) twice for each domain"
            )
        if not self._measured.any():  # single rows, or skipped steps: the weights stay
            return np.zeros_like(self._weights) if self.bound is None else scores_of_weights(self._weights)
        if self.tau is not None:
            self._balance(self.tau)
        squares = self._factors**2 if self.tau is not None else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # the mixer refuses scores that are not finite
            size = squares * _mean(self._sizes, self._measured)
            noise = squares * _mean(self._noises, self._measured)
            self._last = size, noise
            scores = -(self.zeta1 * size - self.zeta2 / (2 * self.batch_rows) * noise)
        if self.bound is None or not np.isfinite(scores).all():
            return scores
        return scores_of_weights(self._conceptual(self.bound, size, noise))

    @property
    @override
    def nbytes(self) -> int:
        return sum(buffer.nbytes for mean in self._means.values() for buffer in mean)

    @override
    def summary(self) -> dict[str, float]:
        size, noise = self._last
        known = size > 0
        if not known.any():
            return {}
        scales = noise[known] / size[known]
        return {"noise_scale_least": float(scales.min()), "noise_scale_most": float(scales.max())}

    def _balance(self, tau: float) -> None:
        """Set the factors of the next round."""
        if self._fractions.any():
            self._factors[:] = tau * np.exp(normalize(tau * _mean(self._losses, self._fractions)))

    def _conceptual(self, bound: DescentBound, size: Vector, noise: Vector) -> Vector:
        rate = bound.learning_rate
        if rate is None:
            rate = float(self._optimizer.param_groups[0]["lr"])
        linear = -rate * bound.beta * size + bound.smoothness * rate**2 / (2 * self.batch_rows) * noise
        # An estimate without bias may be negative, and no curvature is.
        return least_on_simplex(linear, bound.smoothness * rate**2 * bound.gamma * np.maximum(size, 0))


def least_on_simplex(linear: Vector, quadratic: Vector) -> Vector:
    """Return the w of the simplex that minimizes ``sum_k linear_k w_k + quadratic_k w_k^2 / 2``, exactly.

    Where w is positive ``linear_k + quadratic_k w_k`` is the same number, and elsewhere ``linear_k`` is no
    less; that number follows from sorting. Domains without curvature and with the least ``linear_k`` share the
    rest equally.

    Args:
        linear: finite, shape ``(m,)``.
        quadratic: finite and not negative, shape ``(m,)``.

    Returns:
        Shape ``(m,)``, not negative, summing to one.

    Example:
        >>> least_on_simplex(np.array([0.0, 1.0, 9.0]), np.array([2.0, 2.0, 2.0])).tolist()
        [0.75, 0.25, 0.0]
    """
    if not (np.isfinite(linear).all() and np.isfinite(quadratic).all() and (quadratic >= 0).all()):
        raise ValueError(
            f"a mixture follows from finite numbers and no negative curvature; got {linear} and {quadratic}"
        )
    rising = linear - linear.min()
    # The cost of the best single domain; a domain whose linear cost alone is higher has no weight.
    unit = float((rising + quadratic).min())
    if unit == 0:
        free = (rising == 0) & (quadratic == 0)
        return free / free.sum()
    with np.errstate(over="ignore"):
        rising, curved = np.minimum(rising / unit, HUGE), np.minimum(quadratic / unit, HUGE)
    bent = np.flatnonzero((curved > FLAT) & (rising <= 1))
    flat = np.flatnonzero((curved <= FLAT) & (rising <= 1))
    level = float(rising[flat].min()) if len(flat) else math.inf
    if len(bent):
        order = bent[np.argsort(rising[bent], kind="stable")]
        levels = (1 + np.cumsum(rising[order] / curved[order])) / np.cumsum(1 / curved[order])
        level = min(level, float(levels[np.flatnonzero(rising[order] < levels)[-1]]))
    weights = np.zeros(len(linear))
    weights[bent] = np.maximum((level - rising[bent]) / curved[bent], 0)
    lowest = flat[rising[flat] <= level]
    weights[lowest] = max(1 - weights.sum(), 0) / max(len(lowest), 1)
    return weights / weights.sum()


def _mean(sums: Vector, counts: Vector) -> Vector:
    """Return means; where a count is zero, the mean of the others."""
    found = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return np.where(counts > 0, found, found[counts > 0].mean())
