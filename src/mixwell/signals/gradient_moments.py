"""PiKE's signal: how large the domains' gradients are, and how noisy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters, inner_products
from mixwell.hypergradient.traces.base import Combined, empty_trace
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.simplex.weights import TINY, normalize
from mixwell.typing import Gradients, Json, Vector

# A domain whose curvature is less, beside what the minimum can cost at most, is taken for one that has none.
FLAT = 1e-8
HUGE = 1e300


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

    Raises:
        ValueError: a constant is not positive.
    """

    smoothness: float
    beta: float = 1.0
    gamma: float = 1.0
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("smoothness", "beta", "gamma", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of a descent bound must be positive and finite, got {value}")


@final
class GradientMoments(Signal):
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

    A domain that is in no step of a round, or only with single rows, counts as the mean of the others.

    Args:
        zeta1: how much the size counts.
        zeta2: how much the noise counts against it.
        batch_rows: b, the rows of a training step, all domains together.
        tau: of the balanced variant; ``None`` for the plain one.
        unbiased: whether G is without bias; else it is ``|g|^2``, which is larger by ``s2 / n`` on average.
        bound: constants of the conceptual form; ``None`` for the exponential one.

    Raises:
        ValueError: a number is out of range.

    References:
        Li, Deng, Zhong, Razaviyayn, Mirrokni, "PiKE: Adaptive Data Mixing for Large-Scale Multi-Task Learning
        Under Low Gradient Conflicts" (2025), arXiv:2502.06244.
    """

    def __init__(
        self,
        zeta1: float,
        zeta2: float,
        *,
        batch_rows: int,
        tau: float | None = None,
        unbiased: bool = True,
        bound: DescentBound | None = None,
    ) -> None:
        for name, value in (("zeta1", zeta1), ("zeta2", zeta2)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if batch_rows < 1:
            raise ValueError(f"batch_rows must be at least 1, got {batch_rows}")
        if tau is not None and not (math.isfinite(tau) and tau > 0):
            raise ValueError(f"tau must be positive and finite, got {tau}")
        self.zeta1, self.zeta2 = float(zeta1), float(zeta2)
        self.batch_rows = int(batch_rows)
        self.tau = None if tau is None else float(tau)
        self.unbiased = unbiased
        self.bound = bound
        self._attached = False

    def __repr__(self) -> str:
        return (
            f"GradientMoments({self.zeta1!r}, {self.zeta2!r}, batch_rows={self.batch_rows}, tau={self.tau!r}, "
            f"unbiased={self.unbiased!r}, bound={self.bound!r})"
        )

    @property
    def needs_validation(self) -> bool:
        """There is no target but the domains."""
        return False

    @property
    def needs_losses(self) -> bool:
        """The balanced variant looks at them."""
        return self.tau is not None

    @property
    def parts(self) -> int:
        """Noise is what parts of a batch differ by."""
        return 2

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the run.

        Args:
            optimizer: that trains the model.
            parameters: what is trained.
            domains: their names.
            probes: not used.

        Raises:
            ValueError: it is in use by another mixer, or there are other processes.
        """
        if self._attached:
            raise ValueError("this Moments is in use by another mixer; make a new one for each")
        distributed.require_single_process(self)
        m = len(domains)
        self._optimizer, self._parameters = optimizer, parameters
        self._means: dict[int, list[Tensor]] = {}  # of the step, taken when a domain first comes
        self._spreads, self._rows, self._given = np.zeros(m), np.zeros(m), np.zeros(m, dtype=np.int64)
        self._told, self._shares = np.zeros(m), np.zeros(m)
        self._sizes, self._noises, self._measured = np.zeros(m), np.zeros(m), np.zeros(m)
        self._losses, self._heard = np.zeros(m), np.zeros(m)
        self._whole = 0
        self._factors = np.full(m, 1.0 if self.tau is None else self.tau / m)
        self._weights = np.full(m, 1 / m)
        self._last = np.full(m, math.nan), np.full(m, math.nan)
        self._attached = True

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Forget the last round.

        Args:
            round_index: not used.
            weights: of the domains, shape ``(m,)``.
            validation: not used.
        """
        self._weights[:] = weights
        for total in (self._sizes, self._noises, self._measured, self._losses, self._heard):
            total[:] = 0
        self._whole = 0

    def begin_step(self, *, remaining: int) -> None:
        """Forget what a step that came to nothing left.

        Args:
            remaining: not used.
        """
        for total in (self._spreads, self._rows, self._given, self._told, self._shares):
            total[:] = 0

    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Compare a part of a domain's batch with the parts before it.

        Args:
            domain: which.
            gradients: its gradient.
            scale: not used; parts count by their rows.
            weight: not used.
            rows: of this part.

        Raises:
            ValueError: the rows were not told.
        """
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
        # A sum of squares less the square of the sum would drown small noise in rounding.
        apart = [
            -buffer if gradient is None else gradient.detach().to(buffer.dtype) - buffer
            for buffer, gradient in zip(mean, gradients, strict=True)
        ]
        self._spreads[domain] += sum(inner_products(apart, apart)) * before * rows / after
        for buffer, difference in zip(mean, apart, strict=True):
            buffer.add_(difference, alpha=rows / after)
        self._rows[domain] = after
        self._given[domain] += 1

    def record_loss(
        self, domain: int, losses: Tensor, *, share: float, reference: Tensor | None = None
    ) -> None:
        """Keep a domain's mean loss.

        Args:
            domain: which.
            losses: of its rows, or their mean.
            share: the part of the domain's batch that they are of.
            reference: not used.
        """
        self._told[domain] += share * float(losses.double().mean())
        self._shares[domain] += share

    def domain_factor(self, domain: int) -> float:
        """``f_k`` of the balanced variant, 1 otherwise.

        Args:
            domain: which.

        Returns:
            The factor, the same in all steps of a round.
        """
        return float(self._factors[domain])

    def end_step(self, combined: Combined) -> None:
        """Add this step's estimates to the round's.

        Args:
            combined: not used.
        """
        for j in np.flatnonzero(self._given > 1).tolist():
            noise = float(self._spreads[j]) / (int(self._given[j]) - 1)
            size = sum(inner_products(self._means[j], self._means[j]))
            self._sizes[j] += size - noise / float(self._rows[j]) if self.unbiased else size
            self._noises[j] += noise
            self._measured[j] += 1
        self._whole += int(((self._given == 1) & (self._rows > 1)).sum())
        self._losses += self._told
        self._heard += self._shares

    def scores(self, validation: Gradients | None) -> Vector:
        """What the estimates of the round say.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.

        Raises:
            ValueError: no domain's batch was given in parts.
        """
        if not self._measured.any() and self._whole:
            raise ValueError(
                f"{self!r} measures noise between the parts of a domain's batch, and every batch of this "
                "round was whole: enter mixer.domain(name, fraction=1/2, rows=...) twice for each domain"
            )
        if not self._measured.any():  # single rows, or steps that had to be left out: the weights stay
            return np.zeros_like(self._weights) if self.bound is None else _scores_of(self._weights)
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
        return _scores_of(self._conceptual(self.bound, size, noise))

    @property
    def nbytes(self) -> int:
        """The memory of one gradient per domain."""
        return sum(buffer.nbytes for mean in self._means.values() for buffer in mean)

    def summary(self) -> dict[str, float]:
        """The gradient noise of a domain beside its size, for the noisiest and the least noisy one."""
        size, noise = self._last
        known = size > 0
        if not known.any():
            return {}
        scales = noise[known] / size[known]
        return {"noise_scale_least": float(scales.min()), "noise_scale_most": float(scales.max())}

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The sums of the round, and the factors of the balanced variant."""
        sums = {name: total.tolist() for name, total in self._kept().items()}
        return {**sums, "whole": self._whole}, {}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: none.
        """
        saved: dict[str, Any] = dict(values)
        for name, total in self._kept().items():
            total[:] = saved[name]
        self._whole = int(saved["whole"])

    def _kept(self) -> dict[str, Vector]:
        return {
            "sizes": self._sizes,
            "noises": self._noises,
            "measured": self._measured,
            "losses": self._losses,
            "heard": self._heard,
            "factors": self._factors,
            "weights": self._weights,
        }

    def _balance(self, tau: float) -> None:
        """The factors of the coming round."""
        if self._heard.any():
            self._factors[:] = tau * np.exp(normalize(tau * _mean(self._losses, self._heard)))

    def _conceptual(self, bound: DescentBound, size: Vector, noise: Vector) -> Vector:
        rate = bound.learning_rate
        if rate is None:
            rate = float(self._optimizer.param_groups[0]["lr"])
        linear = -rate * bound.beta * size + bound.smoothness * rate**2 / (2 * self.batch_rows) * noise
        # An estimate without bias may be negative, and no curvature is.
        return least_on_simplex(linear, bound.smoothness * rate**2 * bound.gamma * np.maximum(size, 0))


def least_on_simplex(linear: Vector, quadratic: Vector) -> Vector:
    """The w of the simplex that minimizes ``sum_k linear_k w_k + quadratic_k w_k^2 / 2``, exactly.

    Where it is positive ``linear_k + quadratic_k w_k`` is the same number, and elsewhere ``linear_k`` is no
    less; that number follows from sorting. Domains without curvature share equally what is left at the least
    of their ``linear_k``.

    Args:
        linear: finite, shape ``(m,)``.
        quadratic: finite and not negative, shape ``(m,)``.

    Returns:
        Shape ``(m,)``, not negative, summing to one.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> least_on_simplex(np.array([0.0, 1.0, 9.0]), np.array([2.0, 2.0, 2.0])).tolist()
        [0.75, 0.25, 0.0]
    """
    if not (np.isfinite(linear).all() and np.isfinite(quadratic).all() and (quadratic >= 0).all()):
        raise ValueError(
            f"a mixture follows from finite numbers and no negative curvature; got {linear} and {quadratic}"
        )
    rising = linear - linear.min()
    # One domain alone would cost so much, and no domain that costs more from the start has any weight.
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


def _scores_of(weights: Vector) -> Vector:
    return -np.log(np.maximum(weights, TINY))


def _mean(sums: Vector, counts: Vector) -> Vector:
    """Means, where some have nothing to be the mean of: those are the mean of the others."""
    found = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return np.where(counts > 0, found, found[counts > 0].mean())
