"""The results of a block: the losses of its domains, and whether its losses and gradients are finite.

On the CPU they are known when the block ends, so that what is not finite is left out. On an accelerator the host
would have to wait for them; with ``on_nonfinite="raise"`` they are read later, and training ends then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, final

import torch
from torch import Tensor

from mixwell.mixer.round import RoundAccumulator
from mixwell.mixer.scopes import BatchScope, DomainScope, expect_factor
from mixwell.signals.base import LinearSignal
from mixwell.typing import Vector

Losses = list[tuple[str, float, float]]
"""The domain, the mean loss, and the fraction of the domain's batch that it is of."""
REMEDY = "Look at that batch, or lower the learning rate"


@final
class BatchResult:
    """The result of a mixed batch, as far as it is known."""

    def __init__(self) -> None:
        self.losses: Losses = []
        self.lost = False
        """Whether something is not finite."""


@final
class BlockResults:
    """Reads the results of blocks, and rejects what is not finite."""

    def __init__(self, round_accumulator: RoundAccumulator) -> None:
        self._round, self._readings = round_accumulator, round_accumulator.readings
        self._parameters, self._signal = round_accumulator.parameters, round_accumulator.signal
        self._names, self._nonfinite = round_accumulator.weights.names, round_accumulator.nonfinite

    # ------------------------------------------------------------------------------------------- mixed batches

    def of_batch(self, scope: BatchScope, step: int, *, traced: bool) -> BatchResult:
        """Return the result of a mixed batch, whose gradients the parameters have, after its block."""
        result, factor = BatchResult(), scope.propagated(step)
        own = self._signal.gradient_sum() if traced and isinstance(self._signal, LinearSignal) else None
        total = self._parameters.sum_of([p.grad for p in self._parameters.tensors]) if own is None else own
        numbers = [scope.sums, total.view(1), factor.view(1)]
        # Not the scope: it would keep the losses of all tokens in memory until the numbers are read.
        use = partial(self._use_batch, result, scope.rows.tolist(), scope.expected, step, own is not None)
        self._readings.add(torch.cat([one.to(scope.sums) for one in numbers]), use)
        return result

    def _use_batch(
        self,
        result: BatchResult,
        counts: Sequence[int],
        expected: Vector,
        step: int,
        by_domain: bool,
        numbers: Sequence[float],
    ) -> None:
        *sums, total, factor = numbers
        try:
            expect_factor(factor, step)
        except ValueError:
            self._round.interrupted |= not self._readings.at_once
            raise
        problems: dict[str, str] = {}
        if not math.isfinite(total) and not self._readings.at_once:
            problems["batch"] = "gradient"
        elif not math.isfinite(total):
            problems = self._find_gradients(by_domain=by_domain)
        for index, (name, loss, rows) in enumerate(zip(self._names, sums, counts, strict=True)):
            if rows and math.isfinite(loss):
                result.losses.append((name, loss / rows, rows / float(expected[index])))
            elif rows:
                problems[name] = f"loss ({loss / rows:g})"
                problems.pop("batch", None)  # whose gradient follows from that of the loss
        for name, problem in problems.items():
            result.lost = True
            self._reject(name, f"non-finite {problem} in a row of {name!r} at step {step}", step)
        self._take_late(result.losses)

    def _find_gradients(self, *, by_domain: bool) -> dict[str, str]:
        """Return the domains whose gradient is not finite, or the parameter."""
        if by_domain and isinstance(self._signal, LinearSignal):
            return {self._names[index]: "gradient" for index in self._signal.non_finite() or []}
        parameter = self._parameters.non_finite([p.grad for p in self._parameters.tensors])
        return {} if parameter is None else {"batch": f"gradient of parameter {parameter}"}

    # ------------------------------------------------------------------------------------------- one domain

    def accept_domain(self, scope: DomainScope, step: int, fraction: float) -> bool:
        """Return whether the loss and the gradient of a domain may be used, as far as it is known."""
        if self._readings.at_once:
            return self._nonfinite.accept_scope(scope, step, self._parameters)
        total = self._parameters.sum_of(scope.gradients)
        loss = total.new_zeros(()) if scope.loss is None else scope.loss.to(total)
        recorded = scope.loss is not None
        use = partial(self._use_domain, scope.batch.domain, step, fraction, recorded)
        self._readings.add(torch.stack([loss, total]), use)
        return True

    def _use_domain(
        self, name: str, step: int, fraction: float, recorded: bool, numbers: Sequence[float]
    ) -> None:
        loss, total = numbers
        if not math.isfinite(loss):
            self._reject(name, f"non-finite loss ({loss:g}) in {name!r} at step {step}", step)
        if not math.isfinite(total):
            self._reject(name, f"non-finite gradient in {name!r} at step {step}", step)
        if recorded:
            self._take_late([(name, loss, fraction)])

    # ------------------------------------------------------------------------------------------- the whole step

    def norm_is_finite(self, norm: Tensor, step: int) -> bool:
        """Return whether the norm of the combined gradient is finite, as far as it is known."""
        known: list[bool] = []

        def use(numbers: Sequence[float]) -> None:
            known.append(math.isfinite(numbers[0]))
            if not known[0]:
                problem = f"the norm of the combined gradient overflowed at step {step}"
                self._reject("combined gradient", problem, step, "Lower the learning rate")

        self._readings.add(norm.view(1), use)
        return all(known)

    def _reject(self, name: str, problem: str, step: int, remedy: str = REMEDY) -> None:
        if not self._readings.at_once:
            self._raise_late(problem, step)
        self._nonfinite.reject(name, problem, remedy)

    def _raise_late(self, problem: str, step: int) -> NoReturn:
        self._readings.forget()
        self._round.interrupted = True
        raise FloatingPointError(
            f"{problem}, which was seen at step {self._round.clock.steps_done}: the optimizer stepped with it. "
            f"Load a state from before step {step}. {REMEDY}; or set on_nonfinite to 'skip' (mixer.on_nonfinite "
            "in a config) to leave such contributions out, for which the host waits in every step"
        )

    def _take_late(self, losses: Losses) -> None:
        """Add losses to the round's; those that are read at once are added when the step ends."""
        if not self._readings.at_once:
            for name, loss, fraction in losses:
                self._round.losses.add(name, loss, fraction)
