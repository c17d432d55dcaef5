"""The response of `torch.optim.SGD`: P is the identity, eta that of the momentum's remaining steps."""

from __future__ import annotations

from typing import final

from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from mixwell.hypergradient.responses.base import RESPONSES, OptimizerResponse, StepResponse


@final
@RESPONSES.register(SGD)
class SgdResponse(OptimizerResponse):
    """`torch.optim.SGD` with momentum, dampening, Nesterov and (coupled) weight decay.

    ``b <- mu b + (1 - tau) g;  theta <- theta - lr b`` (Nesterov: ``g + mu b``).

    Folded: a gradient that enters n steps before the end of the round has moved the parameters by
    ``lr (1 - tau) (1 - mu^n) / (1 - mu)`` when it ends (Nesterov: ``lr (1 + mu (1 - mu^n) / (1 - mu))``),
    which tends to the known ``lr / (1 - mu)``.
    """

    @property
    @override
    def moments(self) -> int:
        return int(any(group["momentum"] for group in self.optimizer.param_groups))

    @override
    def response(self, index: int, *, remaining: int) -> StepResponse:
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

    @override
    def differentiate_step(
        self, index: int, gradient: Tensor, source: Tensor, trace: Tensor, moments: list[Tensor]
    ) -> None:
        """Update the trace and ``moments = [d b / d w_j]``. The step is linear in the gradient."""
        group = self.group(index)
        mu, lr = float(group["momentum"]), float(group["lr"])
        # A copy: the caller keeps d gradient / d w_j.
        change = source.neg() if group["maximize"] else source.clone()
        change.sub_(trace, alpha=float(group["weight_decay"]))
        if mu:
            # torch starts the buffer with the gradient itself, without dampening.
            first = self.state(index).get("momentum_buffer") is None
            moments[0].mul_(mu).add_(change, alpha=1.0 if first else 1 - float(group["dampening"]))
            change = change.add_(moments[0], alpha=mu) if group["nesterov"] else moments[0]
        trace.add_(change, alpha=lr)
