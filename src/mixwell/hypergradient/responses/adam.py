"""The response of `torch.optim.Adam` and `torch.optim.AdamW`: ``P = 1 / (sqrt(v^) + eps)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.responses.base import (
    RESPONSES,
    DiagonalPreconditioner,
    OptimizerResponse,
    StepResponse,
)


@final
@RESPONSES.register(Adam, AdamW)
class AdamResponse(OptimizerResponse):
    """`torch.optim.Adam` and `AdamW`.

    ``m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  theta <- theta - lr m^ / (sqrt(v^) + eps)``.

    Folded: ``P = 1 / (sqrt(v^) + eps)`` of the previous step (this step's v is known only when all domains have
    been seen), and a gradient that enters n steps before the end has the share of its momentum that acts
    until then. The very first step of a run is ``lr sign(g)``, whose derivative is zero; it leaves no trace.

    Where a coordinate has hardly seen a gradient (the embedding of a rare word), that P is up to ``1 / eps``,
    although Adam would move it no farther than the others when its first gradient comes. So ``sqrt(v^)`` is
    taken as at least a tenth of its root mean square over the coordinates that have seen one. Where no coordinate
    of a parameter has seen one (LoRA's A in the second step, as long as B is zero in the first; every branch that
    a zero multiplies), the coming step t is this parameter's first: ``m^ / sqrt(v^) = sign(g) (1-b1) / (1-b1^t)
    sqrt((1-b2^t) / (1-b2))``, which has no derivative either, so P is zero.
    """

    preconditions = True
    _means: Mapping[int, float] | None = None
    _counted = 0  # steps of the optimizer since the response was made
    _first: dict[int, int] | None = None  # the steps counted before each parameter's first one

    @property
    @override
    def moments(self) -> int:
        return 2

    @override
    def invalidate(self) -> None:
        self._means = None

    @override
    def count_step(self) -> None:
        self._counted += 1

    @override
    def read_counts(self) -> None:
        self.forget_counts()
        self._first_steps()

    @override
    def forget_counts(self) -> None:
        self._first = None

    def _steps(self, index: int) -> int:
        """Return the number of steps that a parameter has taken."""
        step = self.state(index)["step"]
        if not isinstance(step, Tensor) or step.device.type == "cpu":
            return int(step)
        return self._counted - self._first_steps()[index]

    def _first_steps(self) -> dict[int, int]:
        """Return by parameter the number of steps counted before its first one.

        Fused and capturable optimizers keep the number of steps on their device. It is read once in a round.
        """
        if self._first is None:
            states = {i: self.state(i) for i in range(len(self.parameters))}
            steps = {i: torch.as_tensor(state["step"]) for i, state in states.items() if state}
            taken: list[float] = []
            if steps:
                device = next(iter(steps.values())).device
                taken = torch.stack([one.to(device) for one in steps.values()]).tolist()
            self._first = dict.fromkeys(states, self._counted)
            for index, count in zip(steps, taken, strict=True):
                self._first[index] -= int(count)
        return self._first

    @override
    def response(self, index: int, *, remaining: int) -> StepResponse:
        group, state = self.group(index), self.state(index)
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        decoupled = self._decoupled(group)
        decoupled_share = lr * decay if decoupled else 0.0
        if not state:  # the first step moves by lr sign(g), which has no derivative
            self._first_steps()[index] = self._counted
            coupled = 0.0 if decoupled else decay
            return StepResponse(rate=0.0, folded=True, decoupled=decoupled_share, coupled=coupled)
        sign = -1.0 if group["maximize"] else 1.0
        return StepResponse(
            rate=sign * lr * _momentum_share(float(group["betas"][0]), self._steps(index) + 1, remaining),
            preconditioner=lambda: DiagonalPreconditioner(self._inverse_root(index)),
            folded=True,
            decoupled=decoupled_share,
            coupled=0.0 if decoupled else sign * decay,
        )

    @override
    def separable_scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the inverse roots of ``R C^T / mean(v^)`` with R and C the means of v^ over columns and rows.

        That product has the sums of v^ over each row and column (Shazeer, Stern: "Adafactor", 2018). Both are
        taken as at least a hundredth of the mean, and r and c are zero where all of v^ is.
        """
        if not self.state(index):
            return None
        raw = self._second_moment(index)
        correction = 1 - float(self.group(index)["betas"][1]) ** self._steps(index)
        second = raw.flatten(1).to(torch.promote_types(raw.dtype, torch.float32)) / correction
        rows, columns = (distributed.full_tensor(second.mean(dim)) for dim in (1, 0))
        mean = rows.mean()
        floor = torch.where(mean > 0, mean / 100, torch.inf)
        return rows.maximum(floor).rsqrt_(), (columns.maximum(floor) / mean).rsqrt_().nan_to_num_(0.0)

    @override
    def check_differentiable(self, moments: int) -> None:
        if any(group["amsgrad"] for group in self.optimizer.param_groups):
            raise ValueError("ForwardModeTraces do not differentiate amsgrad=True; use DenseTraces()")

    @override
    def differentiate_step(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """Update the trace and ``moments = [d m / d w_j, d v / d w_j]``."""
        group, state = self.group(index), self.state(index)
        parameter = self.parameters.tensors[index].detach()
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = (float(b) for b in group["betas"])
        step = self._steps(index) + 1 if state else 1
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
        # Where v is zero no gradient was ever seen: the first one moves the parameter only by its sign.
        trace.add_(torch.where(root > 0, moved, 0.0), alpha=lr / (1 - beta1**step))

    def _decoupled(self, group: dict[str, Any]) -> bool:
        # torch 2.6 has AdamW as a class of its own, without this setting.
        return bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, AdamW)))

    def _inverse_root(self, index: int) -> Tensor:
        """Return the diagonal of P: the inverse root of the corrected second moment."""
        group = self.group(index)
        raw, correction = self._second_moment(index), 1 - float(group["betas"][1]) ** self._steps(index)
        mean = self._sharded_means()[index] / correction if distributed.is_sharded(raw) else None
        local = _inverse_root(distributed.to_local(raw) / correction, float(group["eps"]), mean)
        return distributed.from_local(local, raw)

    def _second_moment(self, index: int) -> Tensor:
        """Return v, not corrected for its beginning at zero."""
        state = self.state(index)
        return state["max_exp_avg_sq"] if self.group(index)["amsgrad"] else state["exp_avg_sq"]

    def _sharded_means(self) -> Mapping[int, float]:
        """Return the mean of the positive elements of each sharded v. All processes must call it.

        One all-reduce after each step serves all parameters.
        """
        if self._means is None:
            known = [index for index in range(len(self.parameters)) if self.state(index)]
            sharded = {index: v for index in known if distributed.is_sharded(v := self._second_moment(index))}
            local = [distributed.to_local(v) for v in sharded.values()]
            sums = torch.stack(
                [one.sum().double() for one in local] + [one.count_nonzero().double() for one in local]
            )
            shares = np.tile([distributed.replication_weight(v) for v in sharded.values()], 2)
            found = distributed.all_reduce_sum(sums.cpu().numpy() * shares, self.parameters.device)
            total, count = found.reshape(2, -1)
            self._means = dict(zip(sharded, (total / np.maximum(count, 1)).tolist(), strict=True))
        return self._means


def _inverse_root(second: Tensor, eps: float, mean: float | None = None) -> Tensor:
    """``1 / (max(sqrt(v), rms / 10) + eps)``, rms that of ``sqrt(v)`` where v is positive; 0 where all of v is 0.

    ``mean`` is the mean of the positive elements of the full v (0 without any), where ``second`` is a shard of it.
    """
    floor: Tensor | float
    # An infinite floor makes P zero, without another pass and without waiting for an accelerator.
    if mean is None:
        floor = (second.sum() / torch.count_nonzero(second).clamp_min(1)).sqrt() / 10
        floor = torch.where(floor > 0, floor, math.inf)
    else:
        floor = math.sqrt(mean) / 10 or math.inf
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
