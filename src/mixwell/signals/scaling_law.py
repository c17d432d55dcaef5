"""How fast each domain's loss falls, by scaling laws that are fitted while the model trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mixwell.hypergradient.parameters import Parameters
from mixwell.signals.domain_losses import LossSignal
from mixwell.signals.power_laws import Law, Matrix, fit_law
from mixwell.signals.probes import Probes
from mixwell.simplex.weights import TINY
from mixwell.typing import Gradients, Json, Vector

Samples = Literal["all", "domain"]
Credit = Literal["share", "spread"]

# Losses are kept as means over bins of n, eight for each doubling of it: their number does not grow with the run.
_BINS_PER_DOUBLING = 8
_BINS = 40 * _BINS_PER_DOUBLING
_LEAST_BINS = 4


@final
class ScalingLaws(LossSignal):
    """Weights by how fast each domain's loss falls: slope x prior x credit, smoothed (ADO).

    A law ``L_j(n) = e_j + a_j n^-b_j`` is fitted to each domain's training losses. At the end of a round of T
    steps, after t steps in all, with prior mu and weights w in the round:

        ``h <- (1 - g1)^T h + (1 - (1 - g1)^T) w``   (how much of the data was of each domain lately)

        ``rho_j ~ mu_j h_j^s (-dL_j/dn)``, none below the floor before they are made to sum to one

        ``w <- g2 rho + (1 - g2) mean``,   ``mean <- ((t - T) mean + T rho) / t``

    h and the mean begin at the prior. The scores are ``-log w``, for the update
    :class:`mixwell.SoftmaxWeights`. At
    T = 1 this is the published rule. A longer round does to h and to the mean what T steps would, with the rho of
    its end.

    Until there are laws the weights stay. A domain that too little was seen of for a law keeps its prior's part of
    rho; where no loss falls, rho is the prior.

    Args:
        prior: mu by domain, normalized; ``None`` for the initial weights.
        samples: what n counts: ``"all"`` samples that were trained on (in batches; the same for every domain, as
            in the authors' code), or those of the ``"domain"`` (its rows; where only mean losses are told, its
            batches).
        credit: ``"share"``, ``h^s`` as in the paper, or ``"spread"``, ``(h (1 - h))^s`` as in the authors' code.
        credit_power: s.
        credit_rate: g1.
        preference_share: g2.
        floor: the least rho.
        ignore: first steps whose losses are not fitted.
        refit_every: steps, besides those, after which the laws are fitted and fitted again, at the end of a round.
        warmup: the mixer's warm-up, steps that are counted in t and in ``"all"`` samples and not seen.

    Raises:
        ValueError: a setting is out of range.

    References:
        Jiang, Zhou, Feng, Malladi, Kolter: Adaptive data optimization, dynamic sample selection with scaling laws
        (2024).
    """

    def __init__(
        self,
        prior: Mapping[str, float] | None = None,
        *,
        samples: Samples = "all",
        credit: Credit = "share",
        credit_power: float = 0.5,
        credit_rate: float = 0.1,
        preference_share: float = 0.1,
        floor: float = 0.01,
        ignore: int = 0,
        refit_every: int = 1,
        warmup: int = 0,
    ) -> None:
        super().__init__()
        self.prior = None if prior is None else dict(prior)
        self.samples: Samples = samples
        self.credit: Credit = credit
        self.credit_power, self.credit_rate = float(credit_power), float(credit_rate)
        self.preference_share, self.floor = float(preference_share), float(floor)
        self.ignore, self.refit_every, self.warmup = int(ignore), int(refit_every), int(warmup)
        self._check()
        self._steps = self._round_steps = self._since_fit = 0

    def __repr__(self) -> str:
        return (
            f"ScalingLaws({self.prior!r}, samples={self.samples!r}, credit={self.credit!r}, "
            f"credit_power={self.credit_power!r}, credit_rate={self.credit_rate!r}, "
            f"preference_share={self.preference_share!r}, floor={self.floor!r}, ignore={self.ignore!r}, "
            f"refit_every={self.refit_every!r}, warmup={self.warmup!r})"
        )

    @property
    def laws(self) -> dict[str, Law]:
        """The laws that were fitted last, by domain, of those that have one."""
        found = zip(self._domains, self._laws.tolist(), strict=True)
        return {name: Law(*law) for name, law in found if not np.isnan(law).any()}

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Learn of the domains.

        Args:
            optimizer: not used.
            parameters: only their device.
            domains: their names.
            probes: not used.

        Raises:
            ValueError: the prior does not name all of them.
        """
        if self.prior is not None and set(self.prior) != set(domains):
            raise ValueError(
                f"the prior must name every domain once ({', '.join(domains)}); it names {', '.join(self.prior)}"
            )
        super().attach(optimizer, parameters, domains, probes)
        count = len(domains)
        self._begun = False
        self._weights, self._mu, self._recent, self._mean = (np.full(count, 1 / count) for _ in range(4))
        self._rows, self._n = np.zeros(count), np.zeros(count)
        self._bins = np.zeros((3, count, _BINS))  # by bin: losses, the sum of log n, the sum of losses
        self._laws = np.full((count, 3), np.nan)

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Keep the weights; those of the first round are the prior where none is given.

        Args:
            round_index: not used.
            weights: of the domains, shape ``(m,)``.
            validation: not used.
        """
        self._weights[:] = weights
        self._round_steps = 0
        if not self._begun:
            given = weights if self.prior is None else np.array([self.prior[name] for name in self._domains])
            self._mu[:] = given / given.sum()
            self._recent[:] = self._mean[:] = self._mu
            self._begun = True

    def begin_step(self, *, remaining: int) -> None:
        """Forget a step that was begun and left out.

        Args:
            remaining: not used.
        """
        super().begin_step(remaining=remaining)
        self._rows[:] = 0

    def record_loss(
        self, domain: int, losses: Tensor, *, share: float, reference: Tensor | None = None
    ) -> None:
        """Take a domain's losses, and count its rows.

        Args:
            domain: which.
            losses: of its rows or tokens, or their mean.
            share: the part of the domain's batch in this step that they are of.
            reference: not used.
        """
        super().record_loss(domain, losses, share=share)
        self._rows[domain] += len(losses) if losses.dim() else share

    def take(self, losses: Vector) -> None:
        """Put the losses of a step into their bins.

        Args:
            losses: by domain, NaN for those that were not in it, shape ``(m,)``.

        Raises:
            ValueError: a loss is negative, of which there is no law.
        """
        there = np.flatnonzero(~np.isnan(losses))
        if (losses[there] < 0).any():
            wrong = {self._domains[j]: float(losses[j]) for j in there if losses[j] < 0}
            raise ValueError(f"scaling laws are of losses that are not negative, got {wrong}")
        self._steps += 1
        self._round_steps += 1
        if self.samples == "all":
            self._n[:] = self.warmup + self._steps
        else:
            self._n += self.over_processes(self._rows)
        self._rows[:] = 0
        if self._steps > self.ignore:
            self._since_fit += 1
            log_n = np.log(self._n[there])
            places = np.clip(log_n / np.log(2) * _BINS_PER_DOUBLING, 0, _BINS - 1).astype(np.int64)
            self._bins[:, there, places] += np.stack([np.ones(len(there)), log_n, losses[there]])

    def scores(self, validation: Gradients | None) -> Vector:
        """``-log w`` of the weights that the slopes say.

        Args:
            validation: not used.

        Returns:
            Shape ``(m,)``.
        """
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

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The losses in their bins, the laws, and what is averaged."""
        values: Json = {
            "begun": self._begun,
            "steps": self._steps,
            "round_steps": self._round_steps,
            "since_fit": self._since_fit,
        }
        return values, {name: torch.from_numpy(array) for name, array in self._arrays().items()}

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: the counters.
            tensors: the rest.
        """
        self._begun = cast("bool", values["begun"])
        self._steps = cast("int", values["steps"])
        self._round_steps = cast("int", values["round_steps"])
        self._since_fit = cast("int", values["since_fit"])
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
        """rho, which sums to one."""
        recent = self._recent * (1 - self._recent) if self.credit == "spread" else self._recent
        known = ~np.isnan(self._laws).any(axis=1)
        slopes = [Law(*law).slope(n) for law, n in zip(self._laws[known], self._n[known], strict=True)]
        wanted = self._mu.copy()
        falling = self._mu[known] * np.maximum(recent[known], 0) ** self.credit_power * np.array(slopes)
        if falling.sum() > 0:
            wanted[known] = falling / falling.sum() * self._mu[known].sum()
        raised = np.maximum(wanted, self.floor)
        return raised / raised.sum()

    def _check(self) -> None:
        for name in ("credit_power", "floor"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        for name in ("credit_rate", "preference_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for name, least in (("ignore", 0), ("warmup", 0), ("refit_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.samples not in ("all", "domain"):
            raise ValueError(f"samples must be 'all' or 'domain', got {self.samples!r}")
        if self.credit not in ("share", "spread"):
            raise ValueError(f"credit must be 'share' or 'spread', got {self.credit!r}")
        wrong = {name: value for name, value in (self.prior or {}).items() if not 0 < value < np.inf}
        if wrong:
            raise ValueError(f"the prior must be positive and finite, got {wrong}")
