"""What an optimizer does to a gradient, as far as the sensitivity of the parameters to the weights needs it.

With ``z_j = -d theta / d w_j`` one step of an optimizer with learning rate eta, preconditioner P and decay
lambda is, to first order (:class:`StepResponse`),

    ``z_j <- (1 - eta lambda - eta P H) z_j + eta P g_j``

and to all orders in its own moments (:meth:`OptimizerModel.advance`) the derivative of its update rule.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters


@final
@dataclass(frozen=True)
class StepResponse:
    """How one parameter answers a unit of gradient in this step, momentum folded in.

    Args:
        rate: eta times what momentum makes of it until the end of the round.
        preconditioner: computes the diagonal of P as it is when called, ``None`` for the identity.
        folded: whether ``rate`` stands for several steps' momentum, so that a decay must be kept in bounds.
        decoupled: the fraction of the parameter that decoupled weight decay takes (eta lambda).
        coupled: lambda of weight decay that is added to the gradient.
    """

    rate: float
    preconditioner: Callable[[], Tensor] | None = None
    folded: bool = False
    decoupled: float = 0.0
    coupled: float = 0.0

    @cached_property
    def scale(self) -> Tensor | None:
        """The diagonal of P as it was when first asked for, ``None`` for the identity."""
        return None if self.preconditioner is None else self.preconditioner()

    def precondition(self, gradient: Tensor) -> Tensor:
        """``P g``.

        Args:
            gradient: of this parameter.

        Returns:
            The gradient itself where P is the identity, else a new tensor.
        """
        return gradient if self.scale is None else gradient * self.scale

    def shrink(self, curvature: float | Tensor, *, clip: float) -> float | Tensor:
        """The factor of the old trace: ``1 - eta lambda - eta P H``.

        A number stands for the preconditioned curvature ``P H`` itself (one number sums it up best in the
        optimizer's own geometry); a tensor is the diagonal of H. For plain SGD this is the paper's factor,
        whatever its sign. Where momentum or a preconditioner makes ``rate`` stand for more than one step, a
        factor below zero means that the effect is gone before the round ends, and counts as zero.

        Args:
            curvature: of this parameter.
            clip: the factor by which gradient clipping shortens gradients.

        Returns:
            A number where everything is a number, else a tensor of the parameter's shape.
        """
        curved = self.precondition(curvature) if isinstance(curvature, Tensor) else curvature
        factor = 1.0 - self.decoupled - self.rate * clip * curved
        if self.coupled:
            factor = factor - self.rate * self.coupled * (1.0 if self.scale is None else self.scale)
        if not self.folded and self.preconditioner is None:
            return factor
        return factor.clamp_min(0.0) if isinstance(factor, Tensor) else max(factor, 0.0)


class OptimizerModel(ABC):
    """A view of a live optimizer; it reads the optimizer's settings and state and changes nothing.

    Args:
        optimizer: the optimizer.
        parameters: its parameters.
    """

    def __init__(self, optimizer: Optimizer, parameters: Parameters) -> None:
        self.optimizer = optimizer
        self.parameters = parameters

    @abstractmethod
    def response(self, index: int, *, remaining: int) -> StepResponse:
        """The folded response of a parameter, from the state before the step.

        Args:
            index: which parameter.
            remaining: steps until the end of the round, this one included; momentum has only so long to act.

        Returns:
            Its response.
        """

    @abstractmethod
    def advance(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """Differentiate this step: update a domain's trace and the derivatives of the moments in place.

        Args:
            index: which parameter.
            gradient: what the optimizer is about to be given.
            source: ``d gradient / d w_j``.
            trace: ``z_j = -d theta / d w_j``.
            moments: the derivatives of the optimizer's moments by ``w_j``.
        """

    @property
    def moments(self) -> int:
        """How many tensors per parameter and domain the derivatives of the optimizer's own state take."""
        return 0

    def invalidate(self) -> None:
        """The optimizer may have stepped since it was looked at."""

    preconditions: bool = False
    """Whether gradients are divided by a running size of their own, element by element."""

    def check_advance(self, moments: int) -> None:
        """Refuse settings that :meth:`advance` does not differentiate.

        Args:
            moments: how many derivatives of moments there is room for.

        Raises:
            ValueError: there are more moments now, since a setting changed.
        """
        if self.moments > moments:
            raise ValueError(
                "the optimizer's momentum was switched on after the mixer was made; make a new Mixer, or use "
                "DenseTraces()"
            )

    def group(self, index: int) -> dict[str, Any]:
        """The settings of a parameter's group as they are now (so that every lr schedule is followed).

        Args:
            index: which parameter.

        Returns:
            The group.
        """
        return self.optimizer.param_groups[self.parameters.groups[index]]

    def state(self, index: int) -> dict[str, Any]:
        """The optimizer's state of a parameter, empty before its first step.

        Args:
            index: which parameter.

        Returns:
            The state.
        """
        return self.optimizer.state.get(self.parameters.tensors[index], {})


@final
class PlainModel(OptimizerModel):
    """``theta <- theta - lr g``: all that is assumed of an optimizer that is not known."""

    def response(self, index: int, *, remaining: int) -> StepResponse:
        """The learning rate.

        Args:
            index: which parameter.
            remaining: not used.

        Returns:
            Its response.
        """
        return StepResponse(rate=float(self.group(index)["lr"]))

    def advance(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """``z <- z + lr dG``.

        Args:
            index: which parameter.
            gradient: not used.
            source: ``d gradient / d w_j``.
            trace: updated.
            moments: empty.
        """
        trace.add_(source, alpha=float(self.group(index)["lr"]))


@final
class SgdModel(OptimizerModel):
    """`torch.optim.SGD` with momentum, dampening, Nesterov and (coupled) weight decay.

    ``b <- mu b + (1 - tau) g;  theta <- theta - lr b`` (Nesterov: ``g + mu b``).

    Folded: a gradient that enters n steps before the end of the round has moved the parameters by
    ``lr (1 - tau) (1 - mu^n) / (1 - mu)`` when it ends (Nesterov: ``lr (1 + mu (1 - mu^n) / (1 - mu))``),
    which tends to the known ``lr / (1 - mu)``.
    """

    @property
    def moments(self) -> int:
        """One where there is momentum."""
        return int(any(group["momentum"] for group in self.optimizer.param_groups))

    def response(self, index: int, *, remaining: int) -> StepResponse:
        """The learning rate with momentum folded in.

        Args:
            index: which parameter.
            remaining: steps until the end of the round, this one included.

        Returns:
            Its response.
        """
        group = self.group(index)
        mu = float(group["momentum"])
        summed = remaining if mu == 1 else (1 - mu**remaining) / (1 - mu)
        if group["nesterov"]:
            summed = 1 + mu * summed
        elif mu and self.state(index).get("momentum_buffer") is not None:
            summed *= 1 - float(group["dampening"])
        sign = -1.0 if group["maximize"] else 1.0
        return StepResponse(
            rate=sign * float(group["lr"]) * summed,
            folded=mu > 0,
            coupled=sign * float(group["weight_decay"]),
        )

    def advance(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """The derivative of one SGD step.

        Args:
            index: which parameter.
            gradient: not used (the step is linear in it).
            source: ``d gradient / d w_j``.
            trace: updated.
            moments: ``[d b / d w_j]``, updated.
        """
        group = self.group(index)
        mu, lr = float(group["momentum"]), float(group["lr"])
        change = source.neg() if group["maximize"] else source.clone()
        change.sub_(trace, alpha=float(group["weight_decay"]))
        if mu:
            first = self.state(index).get("momentum_buffer") is None
            moments[0].mul_(mu).add_(change, alpha=1.0 if first else 1 - float(group["dampening"]))
            change = change.add_(moments[0], alpha=mu) if group["nesterov"] else moments[0]
        trace.add_(change, alpha=lr)


@final
class AdamModel(OptimizerModel):
    """`torch.optim.Adam` and `AdamW`.

    ``m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  theta <- theta - lr m^ / (sqrt(v^) + eps)``.

    Folded: ``P = 1 / (sqrt(v^) + eps)`` of the step before (this step's v is known only when all domains have
    been seen), and a gradient that enters n steps before the end has the share of its momentum that acts
    until then. The very first step of a run is ``lr sign(g)``, whose derivative is zero; it leaves no trace.

    Where a coordinate has hardly seen a gradient (the embedding of a rare word), that P is up to ``1 / eps``,
    although Adam would move it no farther than the others when its first gradient comes. So ``sqrt(v^)`` is
    taken as at least a tenth of its root mean square over the coordinates that have seen one.
    """

    @property
    def moments(self) -> int:
        """The two of Adam."""
        return 2

    def response(self, index: int, *, remaining: int) -> StepResponse:
        """The preconditioned learning rate with momentum folded in.

        Args:
            index: which parameter.
            remaining: steps until the end of the round, this one included.

        Returns:
            Its response.
        """
        group, state = self.group(index), self.state(index)
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = self._decoupled(group)
        decoupled_share = lr * decay if decoupled else 0.0
        if not state:
            coupled = 0.0 if decoupled else decay
            return StepResponse(rate=0.0, folded=True, decoupled=decoupled_share, coupled=coupled)
        sign = -1.0 if group["maximize"] else 1.0
        return StepResponse(
            rate=sign * lr * _momentum_share(float(group["betas"][0]), int(state["step"]) + 1, remaining),
            preconditioner=lambda: self._inverse_root(index),
            folded=True,
            decoupled=decoupled_share,
            coupled=0.0 if decoupled else sign * decay,
        )

    preconditions = True

    def _inverse_root(self, index: int) -> Tensor:
        """P: the inverse root of the corrected second moment."""
        group, state = self.group(index), self.state(index)
        raw, correction = self._second_moment(index), 1 - float(group["betas"][1]) ** int(state["step"])
        mean = self._spread_means()[index] / correction if distributed.is_sharded(raw) else None
        own = _inverse_root(distributed.to_local(raw) / correction, float(group["eps"]), mean)
        return distributed.from_local(own, raw)

    def _second_moment(self, index: int) -> Tensor:
        """v, not corrected for its beginning at zero."""
        state = self.state(index)
        return state["max_exp_avg_sq"] if self.group(index)["amsgrad"] else state["exp_avg_sq"]

    def invalidate(self) -> None:
        """Forget what was measured of the second moments."""
        self._means = None

    def _spread_means(self) -> Mapping[int, float]:
        """Of each v that is spread over processes the mean of its positive numbers; all processes must ask for it.

        They are found for all parameters at once, in one exchange after each step.
        """
        if self._means is None:
            known = [index for index in range(len(self.parameters)) if self.state(index)]
            spread = {index: v for index in known if distributed.is_sharded(v := self._second_moment(index))}
            own = [distributed.to_local(v) for v in spread.values()]
            sums = torch.stack(
                [one.sum().double() for one in own] + [one.count_nonzero().double() for one in own]
            )
            shares = np.tile([distributed.replication_weight(v) for v in spread.values()], 2)
            found = distributed.all_reduce_sum(sums.cpu().numpy() * shares, self.parameters.device).reshape(
                2, -1
            )
            self._means = dict(zip(spread, (found[0] / np.maximum(found[1], 1)).tolist(), strict=True))
        return self._means

    _means: Mapping[int, float] | None = None

    def check_advance(self, moments: int) -> None:
        """Refuse AMSGrad, whose running maximum is not differentiated.

        Args:
            moments: how many derivatives of moments there is room for.

        Raises:
            ValueError: a parameter group uses it.
        """
        if any(group["amsgrad"] for group in self.optimizer.param_groups):
            raise ValueError("carried traces do not differentiate amsgrad=True; use DenseTraces() with it")

    def advance(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """The derivative of one Adam step, both moments included.

        Args:
            index: which parameter.
            gradient: what the optimizer is about to be given.
            source: ``d gradient / d w_j``.
            trace: updated.
            moments: ``[d m / d w_j, d v / d w_j]``, updated.
        """
        group, state = self.group(index), self.state(index)
        parameter = self.parameters.tensors[index].detach()
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = (float(b) for b in group["betas"])
        step = int(state["step"]) + 1 if state else 1
        given, change = (-gradient, -source) if group["maximize"] else (gradient, source)
        if self._decoupled(group):
            trace.mul_(1 - lr * decay)
        elif decay:
            given, change = given + decay * parameter, change - decay * trace
        first = (1 - beta1) * given + (beta1 * state["exp_avg"] if state else 0.0)
        second = (1 - beta2) * given.square() + (beta2 * state["exp_avg_sq"] if state else 0.0)
        moments[0].mul_(beta1).add_(change, alpha=1 - beta1)
        moments[1].mul_(beta2).addcmul_(given, change, value=2 * (1 - beta2))
        root = second.sqrt()
        correction = math.sqrt(1 - beta2**step)
        denominator = root / correction + float(group["eps"])
        root_change = moments[1] / (2 * root * correction)
        moved = moments[0] / denominator - first * root_change / denominator.square()
        # Where v is zero no gradient was ever seen: the first one moves the parameter by its sign alone.
        trace.add_(torch.where(root > 0, moved, 0.0), alpha=lr / (1 - beta1**step))

    def _decoupled(self, group: dict[str, Any]) -> bool:
        # torch 2.6 has AdamW as a class of its own, without this setting.
        return bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, AdamW)))


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of what Accelerate or Lightning have put around it.

    Args:
        optimizer: any. What others wrap changes the steps, so it is left as it is.

    Returns:
        The one that steps, whose settings and state are read.
    """
    known = type(optimizer).__module__.startswith(("accelerate.", "lightning.", "pytorch_lightning."))
    inner = getattr(optimizer, "optimizer", None) if known else None
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def response_for(optimizer: Optimizer, parameters: Parameters) -> OptimizerModel:
    """The model of an optimizer.

    Args:
        optimizer: any optimizer.
        parameters: its parameters.

    Returns:
        :class:`SgdModel` or :class:`AdamModel` where it is one of these (and does not override ``step``), else
        :class:`PlainModel`, with a warning.
    """
    for known, model in ((SGD, SgdModel), (Adam, AdamModel), (AdamW, AdamModel)):
        if isinstance(optimizer, known) and _same_step(type(optimizer), known):
            return model(optimizer, parameters)
    warnings.warn(
        f"mixwell does not know the optimizer {type(optimizer).__name__}: its steps are treated as "
        "theta <- theta - lr * gradient. The direction of the hypergradient may suffer; SGD, Adam and AdamW "
        "of torch.optim are known",
        stacklevel=3,
    )
    return PlainModel(optimizer, parameters)


def _same_step(kind: type[Optimizer], known: type[Optimizer]) -> bool:
    """Whether no class between ``kind`` and ``known`` has a ``step`` of its own (torch's AdamW has none)."""
    between = kind.__mro__[: kind.__mro__.index(known)]
    return not any("step" in vars(cls) and not cls.__module__.startswith("torch.optim") for cls in between)


def _inverse_root(second: Tensor, eps: float, mean: float | None = None) -> Tensor:
    """``1 / (max(sqrt(v), rms / 10) + eps)``, rms that of ``sqrt(v)`` where v is positive.

    ``mean`` is that of the positive numbers of v, where this is a part of it.
    """
    floor: Tensor | float
    if mean is None:
        floor = (second.sum() / torch.count_nonzero(second).clamp_min(1)).sqrt() / 10
    else:
        floor = math.sqrt(mean) / 10
    return second.sqrt().clamp_min_(floor).add_(eps).reciprocal_()


@lru_cache(maxsize=256)
def _momentum_share(beta: float, step: int, remaining: int) -> float:
    """``sum_{i<n} (1-b) b^i / (1 - b^(step+i))``: the share of a gradient's momentum that acts in n steps."""
    if beta == 0:
        return 1.0
    if beta**step < 1e-12:
        return 1 - beta**remaining
    # Beyond a power of 1e-17 the terms no longer change the sum.
    count = min(remaining, math.ceil(math.log(1e-17) / math.log(beta)))
    return sum((1 - beta) * beta**i / (1 - beta ** (step + i)) for i in range(count))
