"""DoGE's signal: how well a domain's gradient points where the target's does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast, final

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters, inner_products
from mixwell.hypergradient.traces.base import Combined, empty_trace
from mixwell.signals.base import Signal
from mixwell.signals.probes import Probes
from mixwell.typing import Gradients, Json, Vector

# As torch.nn.utils.clip_grad_norm_ has it, and DoGE beside the mean norm.
EPSILON = 1e-6


@final
class Alignment(Signal):
    """Inner products of the domains' gradients with the target's (DoGE).

    In a step with learning rate ``eta_t`` (of the first parameter group) every domain's gradient is shortened
    to ``clip_norm`` and divided by the mean of their norms; a round adds up what its steps have,

        ``u_j = sum_t eta_t clip(g_j) / (mean_i |clip(g_i)| + 1e-6)``,

    and ends with ``W_j = <u_j, clip(g_target)>``, cut to ``[0, score_cap * sum_t eta_t]``: domains that point
    away from the target count as much as those that have nothing to do with it. The score is ``-W_j``. A
    round of one step is the published rule; a longer one does what its steps would have added up to, with one
    target gradient at its end for all of them.

    A domain that is not in a step adds nothing to its own sum and is not in the mean of norms; one that is
    there only with some probability counts by its inverse, after it was shortened. Parts of a domain's batch
    are put together before they are shortened. One gradient per domain is held, two where a round has several
    steps.

    Args:
        clip_norm: to which the gradients of the domains and of the target are shortened.
        universal: whether the target is the sum of the domains' gradients in the last step, each shortened
            (universal generalization), so that no validation gradient is needed.
        score_cap: what ``W_j`` may be at most, in learning rates.

    Raises:
        ValueError: the norm or the cap is not positive.

    References:
        Fan, Pagliardini, Jaggi, "DoGE: Domain Reweighting with Generalization Estimation" (2023),
        arXiv:2310.15393.
    """

    def __init__(self, clip_norm: float = 5.0, *, universal: bool = False, score_cap: float = 5.0) -> None:
        for name, value in (("clip_norm", clip_norm), ("score_cap", score_cap)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.clip_norm = float(clip_norm)
        self.universal = universal
        self.score_cap = float(score_cap)
        self._attached = False

    def __repr__(self) -> str:
        return f"Alignment({self.clip_norm!r}, universal={self.universal!r}, score_cap={self.score_cap!r})"

    @property
    def needs_validation(self) -> bool:
        """Unless the domains themselves are the target."""
        return not self.universal

    def attach(
        self,
        optimizer: Optimizer,
        parameters: Parameters,
        domains: Sequence[str],
        probes: Probes | None = None,
    ) -> None:
        """Take the memory of one gradient per domain.

        Args:
            optimizer: that trains the model; its learning rate is read at every step.
            parameters: what is trained.
            domains: their names.
            probes: not used.

        Raises:
            ValueError: it is in use by another mixer, or there are other processes, whose gradients it holds.
        """
        if self._attached:
            raise ValueError("this Alignment is in use by another mixer; make a new one for each")
        distributed.require_single_process(self)
        self._optimizer, self._parameters = optimizer, parameters
        self._sums = [self._empty() for _ in domains]
        self._step: list[
            list[Tensor]
        ] = []  # of the second and later steps of a round; taken when there is one
        self._target = self._empty() if self.universal else []
        self._scales = np.zeros(len(domains))
        self._steps, self._rates = 0, 0.0
        self._attached = True

    def begin_round(self, round_index: int, weights: Vector, validation: Gradients | None) -> None:
        """Forget the last round.

        Args:
            round_index: not used.
            weights: not used.
            validation: not used.
        """
        self._steps, self._rates = 0, 0.0

    def begin_step(self, *, remaining: int) -> None:
        """Forget what a step that came to nothing left.

        Args:
            remaining: not used.
        """
        self._scales[:] = 0

    def fold(
        self, domain: int, gradients: Gradients, *, scale: float, weight: float, rows: int | None = None
    ) -> None:
        """Put a part of a domain's gradient to the others of this step.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
            weight: not used.
            rows: not used.
        """
        first = not self._scales[domain]
        for buffer, gradient in zip(self._held()[domain], gradients, strict=True):
            if first:
                buffer.zero_()  # it has what an earlier step or round left
            if gradient is not None:
                buffer.add_(gradient.detach(), alpha=scale)
        self._scales[domain] += scale

    def end_step(self, combined: Combined) -> None:
        """Shorten the gradients of this step, divide them by their mean norm and add them to the round's.

        Args:
            combined: not used; the gradients of the domains are compared as they came.
        """
        held = self._held()
        present = np.flatnonzero(self._scales).tolist()
        # What is divided out here is the inverse of the inclusion probability: shares add up to one.
        norms = _norms([held[j] for j in present]) / self._scales[present]
        factors = self._shortened(norms)
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        common = learning_rate / (float((factors * norms).mean()) + EPSILON)
        for target in self._target:
            target.zero_()
        for j, factor in zip(present, factors.tolist(), strict=True):
            for target, gradient in zip(self._target, held[j], strict=False):
                target.add_(gradient, alpha=factor)
            for total, gradient in zip(self._sums[j], held[j], strict=True):
                if total is gradient:
                    total.mul_(common * factor)
                else:
                    total.add_(gradient, alpha=common * factor)
        if self._steps == 0:
            for j in set(range(len(self._sums))) - set(present):
                for total in self._sums[j]:
                    total.zero_()
        self._steps += 1
        self._rates += learning_rate

    def scores(self, validation: Gradients | None) -> Vector:
        """``-W_j``.

        Args:
            validation: the target's gradient; not used where the domains are the target.

        Returns:
            Shape ``(m,)``.
        """
        if self._steps == 0:  # all steps of the round had to be left out
            return np.zeros(len(self._sums))
        target, factor = cast("Gradients", self._target), 1.0
        if not self.universal:
            assert validation is not None
            target = validation
            factor = float(self._shortened(_norms([validation]))[0])
        aligned = factor * np.array([sum(inner_products(target, total)) for total in self._sums])
        return -np.clip(aligned, 0, self.score_cap * self._rates)

    @property
    def nbytes(self) -> int:
        """The memory of the gradients."""
        return sum(tensor.nbytes for one in (*self._sums, *self._step, self._target) for tensor in one)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """What the steps of the round have added up to."""
        named = {
            f"{j}.{name}": total
            for j, totals in enumerate(self._sums)
            for name, total in zip(self._parameters.names, totals, strict=True)
        }
        targets = zip(self._parameters.names, self._target, strict=False)
        named.update({f"target.{name}": target for name, target in targets})
        return {"steps": self._steps, "rates": self._rates}, named

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave.

        Args:
            values: its plain values.
            tensors: its tensors.
        """
        self._steps, self._rates = cast("int", values["steps"]), cast("float", values["rates"])
        for name, own in self.state()[1].items():
            own.copy_(tensors[name])

    def _empty(self) -> list[Tensor]:
        return [empty_trace(parameter) for parameter in self._parameters.tensors]

    def _held(self) -> list[list[Tensor]]:
        """Where the gradients of this step are; in a round's first step where its sums will be."""
        if self._steps == 0:
            return self._sums
        if not self._step:
            self._step = [self._empty() for _ in self._sums]
        return self._step

    def _shortened(self, norms: Vector) -> Vector:
        """The factors that make gradients of these norms no longer than they may be."""
        factors = np.minimum(1.0, self.clip_norm / (norms + EPSILON))
        # A norm that overflowed must not make its gradient zero; the score is then refused by the mixer.
        return np.where(np.isfinite(norms), factors, math.nan)


def _norms(vectors: Sequence[Sequence[Tensor | None]]) -> Vector:
    """The norms of vectors, each of several tensors; an accelerator is waited for once."""
    every = [tensor for vector in vectors for tensor in vector]
    return np.sqrt(np.reshape(inner_products(every, every), (len(vectors), -1)).sum(axis=1))
