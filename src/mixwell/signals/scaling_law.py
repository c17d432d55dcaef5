"""How fast each domain's loss falls, by scaling laws fitted while the model trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, cast, final, get_args

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from mixwell.signals.domain_losses import LossSignal
from mixwell.signals.power_laws import Law, Matrix, fit_law
from mixwell.signals.probes import Probes
from mixwell.signals.settings import require_not_negative
from mixwell.simplex.weights import TINY
from mixwell.typing import Gradients, Json, Vector

Samples = Literal["all", "domain"]
Credit = Literal["share", "spread"]

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
        ignore: first steps whose losses are not fitted.
        refit_every: steps, in addition to those, between fits; the laws are fitted at the end of a round.
        warmup: the mixer's warmup, steps that count in t and in ``"all"`` samples although they are not seen.

    Raises:
        ValueError: a setting is out of range.

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

    def __post_init__(self) -> None:
        require_not_negative(credit_power=self.credit_power, floor=self.floor)
        for name in ("credit_rate", "preference_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for name, least in (("ignore", 0), ("warmup", 0), ("refit_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.samples not in get_args(Samples):
            raise ValueError(f"samples must be 'all' or 'domain', got {self.samples!r}")
        if self.credit not in get_args(Credit):
            raise ValueError(f"credit must be 'share' or 'spread', got {self.credit!r}")
        wrong = {name: value for name, value in (self.prior or {}).items() if not 0 < value < np.inf}
        if wrong:
            raise ValueError(f"the prior must be positive and finite, got {wrong}")
        self._steps = self._round_steps = self._since_fit = 0

    @property
    def laws(self) -> dict[str, Law]:
        """The last fitted laws, by domain, where there is one."""
        found = zip(self._domains, self._laws.tolist(), strict=True)
        return {name: Law(*law) for name, law in found if not np.isnan(law).any()}

    @override
    def _attach(self, optimizer: Optimizer, probes: Probes | None) -> None:
        domains = self._domains
        if self.prior is not None and set(self.prior) != set(domains):
            raise ValueError(
                f"the prior must name every domain once ({', '.join(domains)}); it names {', '.join(self.prior)}"
            )
        super()._attach(optimizer, probes)
        count = len(domains)
        self._begun = False
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
    def begin_step(self, *, remaining: int) -> None:
        super().begin_step(remaining=remaining)
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
        return -np.log(np.maximum(new, TINY))

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        values: Json = {
            "begun": self._begun,
            "steps": self._steps,
            "round_steps": self._round_steps,
            "since_fit": self._since_fit,
        }
        return values, {name: torch.from_numpy(array) for name, array in self._arrays().items()}

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        counts = cast("dict[str, int]", values)
        self._begun, self._steps = bool(counts["begun"]), counts["steps"]
        self._round_steps, self._since_fit = counts["round_steps"], counts["since_fit"]
        for name, array in self._arrays().items():
            array[:] = tensors[name].cpu().numpy()

    def _arrays(self) -> dict[str, Matrix]:
        return {
            "weights": self._weights,
            "prior": self._mu,
            "recent": self._recent,
            "mean": self._mean,
            "n": self._n,
            "bins": self._bins,
            "laws": self._laws,
        }

    def _fit(self) -> None:
        for place, (counts, log_n, losses) in enumerate(self._bins.transpose(1, 0, 2)):
            seen = counts > 0
            if seen.sum() >= _LEAST_BINS:
                each = counts[seen]
                law = fit_law(np.exp(log_n[seen] / each), losses[seen] / each, each)
                self._laws[place] = law.irreducible, law.scale, law.exponent
        self._since_fit = 0

    def _preferred(self) -> Vector:
        """Return rho, which sums to one."""
        recent = self._recent * (1 - self._recent) if self.credit == "spread" else self._recent
        known = ~np.isnan(self._laws).any(axis=1)
        slopes = [Law(*law).slope(n) for law, n in zip(self._laws[known], self._n[known], strict=True)]
        wanted = self._mu.copy()
        falling = self._mu[known] * np.maximum(recent[known], 0) ** self.credit_power * np.array(slopes)
        if falling.sum() > 0:
            wanted[known] = falling / falling.sum() * self._mu[known].sum()
        raised = np.maximum(wanted, self.floor)
        return raised / raised.sum()
