"""The gradient of a step, put together from those of the domains one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Gradients, Vector

TOLERANCE = 1e-6


# Sums begin at multiples of so many numbers, at which devices read fastest.
ALIGNED = 16


@final
class WeightedSum:
    """``sum_j w_j g_j`` in one set of buffers that live as long as the run.

    Args:
        parameters: whose gradients are summed.
        lazy: take the memory when the first gradient comes.
        shared: whether :meth:`share` averages it over processes. The buffers then lie one after the other, so that
            they are exchanged at once.
    """

    def __init__(self, parameters: Parameters, *, lazy: bool = False, shared: bool = False) -> None:
        self._parameters, self._shared = parameters, shared
        self._flats: list[Tensor] = []
        self._buffers: Gradients = [None] * len(parameters)
        self._filled = [False] * len(parameters)
        if not lazy:
            self._allocate()

    def _allocate(self) -> None:
        tensors = self._parameters.tensors
        if not self._shared:
            self._buffers = [torch.zeros_like(p, requires_grad=False) for p in tensors]
            return
        places: dict[tuple[torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for index, parameter in enumerate(tensors):
            kind = places.setdefault((parameter.dtype, parameter.device), [(-1, 0)])
            kind.append((index, kind[-1][1] + -(-parameter.numel() // ALIGNED) * ALIGNED))
        for (dtype, device), ends in places.items():
            flat = torch.zeros(ends[-1][1], dtype=dtype, device=device)
            self._flats.append(flat)
            for (_, begin), (index, _) in itertools.pairwise(ends):
                parameter = tensors[index]
                self._buffers[index] = flat[begin : begin + parameter.numel()].view(parameter.shape)

    def add(self, gradients: Gradients, factor: float) -> None:
        """Add ``factor * gradients``.

        Args:
            gradients: one per parameter.
            factor: weight times scale.
        """
        if self._shared and not self._flats:
            self._allocate()
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            buffer = self._buffers[i]
            if buffer is None:
                self._buffers[i] = gradient.detach() * factor
            elif self._filled[i]:
                distributed.to_local(buffer).add_(distributed.to_local(gradient.detach()), alpha=factor)
            else:
                torch.mul(distributed.to_local(gradient.detach()), factor, out=distributed.to_local(buffer))
            self._filled[i] = True

    def take(self, gradients: Gradients, factor: float) -> None:
        """Add ``factor * gradients``, using the gradients' own memory where there is none yet.

        Args:
            gradients: one per parameter, not to be used again.
            factor: weight times scale.
        """
        for i, gradient in enumerate(gradients):
            if gradient is not None and self._buffers[i] is None and not self._shared:
                self._buffers[i] = gradient.detach() if factor == 1 else gradient.detach().mul_(factor)
                self._filled[i] = True
                gradients[i] = None
        self.add(gradients, factor)

    def share(self) -> None:
        """Replace the sum by its mean over all processes, in one reduction for each dtype; all must call it.

        A parameter that a process had no gradient of counts as zero there, and has none afterwards only where no
        process had one.
        """
        if not self._flats:
            self._allocate()
        for buffer, filled in zip(self._buffers, self._filled, strict=True):
            if buffer is not None and not filled:
                buffer.zero_()
        flags = torch.tensor(self._filled, dtype=torch.uint8, device=self._parameters.device)
        # Divided first, as a sum of many could overflow in half precision.
        pending: list[Any] = [
            torch.distributed.all_reduce(flat.div_(distributed.world_size()), async_op=True)
            for flat in self._flats
        ]
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        for one in pending:
            one.wait()
        self._filled = [bool(flag) for flag in flags.tolist()]

    @property
    def gradients(self) -> Gradients:
        """The sum so far, ``None`` for parameters that no domain touched."""
        return [self._buffers[i] if filled else None for i, filled in enumerate(self._filled)]

    def __bool__(self) -> bool:
        return any(self._filled)

    def clear(self) -> None:
        """Begin a new sum."""
        self._filled = [False] * len(self._buffers)

    @property
    def nbytes(self) -> int:
        """The memory of the buffers."""
        own = self._flats or [distributed.to_local(buffer) for buffer in self._buffers if buffer is not None]
        return sum(buffer.nbytes for buffer in own)


@final
class Shares:
    """Which part of each domain's batch a step has seen; the parts of a domain must add up to one.

    Args:
        names: the domains.
        inclusion: the probability with which a domain is in a step, for those that may be absent.
    """

    def __init__(self, names: Sequence[str], inclusion: Mapping[str, float]) -> None:
        self._names = tuple(names)
        self._given: dict[str, float] = {}
        self._portions: dict[str, float] = {}
        self.inclusion = inclusion

    @property
    def inclusion(self) -> Mapping[str, float]:
        """The probability with which a domain is in a step, for those that may be absent."""
        return self._inclusion

    @inclusion.setter
    def inclusion(self, probabilities: Mapping[str, float]) -> None:
        for name, probability in probabilities.items():
            if name not in self._names:
                raise ValueError(f"unknown domain {name!r}; the domains are {', '.join(self._names)}")
            if not 0 < probability <= 1:
                raise ValueError(
                    f"the inclusion probability of {name!r} must be in (0, 1], got {probability}"
                )
        self._inclusion = {name: float(probability) for name, probability in probabilities.items()}

    @property
    def portions(self) -> Mapping[str, float]:
        """The rows of a domain that this process has, over the mean of all processes; 1 for those not named."""
        return self._portions

    @portions.setter
    def portions(self, portions: Mapping[str, float]) -> None:
        for name, portion in portions.items():
            if name not in (*self._names, "validation"):
                raise ValueError(f"unknown domain {name!r}; the domains are {', '.join(self._names)}")
            if not 0 <= portion < math.inf:
                raise ValueError(f"the portion of {name!r} must be finite and not negative, got {portion}")
        self._portions = {name: float(portion) for name, portion in portions.items()}

    def scale(self, name: str, share: float) -> float:
        """The factor of a part's gradient, so that the expectation of the sum is the whole gradient.

        Args:
            name: the domain.
            share: the part.

        Returns:
            Share over inclusion probability.
        """
        return share / self._inclusion.get(name, 1.0)

    def check_step(self, step: int) -> None:
        """Refuse a step in which a domain is missing or incomplete.

        Args:
            step: the number of the step, for the message.

        Raises:
            ValueError: a domain is missing although it is always included, or its shares do not sum to one.
        """
        for name in self._names:
            elsewhere = not self._portions.get(name, 1.0)
            if not self.of(name) and (elsewhere or self._inclusion.get(name, 1.0) < 1):
                continue
            if not self.of(name):
                here = (
                    ""
                    if distributed.is_single_process()
                    else "; or in mixer.portions that only other processes have rows"
                )
                raise ValueError(
                    f"domain {name!r} is missing in step {step}: run it in `with mixer.domain({name!r}):`, or say "
                    f"how often it is there with mixer.inclusion = {{{name!r}: probability}}{here}"
                )
            if not self.complete(name):
                raise ValueError(
                    f"the shares of domain {name!r} in step {step} sum to {self.of(name):g}, not 1"
                )

    def check(self, name: str, share: float, step: int) -> None:
        """Refuse a share that is out of range or one too many.

        Args:
            name: the domain.
            share: the part that is about to be computed.
            step: the number of the step, for the message.

        Raises:
            ValueError: the share is not in (0, 1], or the domain's shares would exceed one.
        """
        if not 0 < share <= 1:
            raise ValueError(f"the share of a batch must be in (0, 1], got {share} for {name!r}")
        total = self.of(name) + share
        if total > 1 + TOLERANCE:
            raise ValueError(
                f"{name!r} is given twice in step {step}: its shares sum to {total:g}. Call mixer.step() "
                "between steps; for several micro-batches in one step give each its share, as in "
                "mixer.domain(name, share=1/4)"
            )

    def give(self, name: str, share: float) -> None:
        """A part was computed.

        Args:
            name: the domain.
            share: the part.
        """
        self._given[name] = self.of(name) + share

    def of(self, name: str) -> float:
        """The part of a domain so far.

        Args:
            name: the domain.

        Returns:
            Between 0 and 1.
        """
        return self._given.get(name, 0.0)

    def complete(self, name: str) -> bool:
        """Whether the parts of a domain add up to one.

        Args:
            name: the domain.

        Returns:
            Whether they do.
        """
        return self.of(name) >= 1 - TOLERANCE

    def __bool__(self) -> bool:
        return bool(self._given)

    def clear(self) -> None:
        """Begin a new step."""
        self._given = {}


@final
class LossMeans:
    """The means of the losses that were told over a round, by domain."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        """By domain the sum of share times loss, and the sum of shares."""

    def add(self, name: str, loss: Tensor | float | None, share: float) -> None:
        """A loss was told, or not.

        Args:
            name: whose.
            loss: one number, or ``None``.
            share: the part of a batch that it is of.
        """
        if loss is not None:
            total, count = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + share * float(loss), count + share)

    def means(self) -> dict[str, float]:
        """The mean loss of every domain of which one was told."""
        return {name: total / count for name, (total, count) in self.sums.items()}


@final
class RoundScores:
    """The scores at the validation points of a round: their mean is the round's, their spread its noise."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Vector]] = []
        """The step of the round and the scores of every point, shape ``(m,)``."""
        self._parts: list[tuple[float, Vector]] = []

    def add(self, step: int, scores: Vector) -> None:
        """Keep the scores of a point.

        Args:
            step: the number of steps of the round before it, at least 1.
            scores: finite, shape ``(m,)``.
        """
        self.points.append((step, scores))

    def add_part(self, share: float, scores: Vector) -> None:
        """Keep the scores of a part of the only point's batch, which tell the noise of that batch.

        Args:
            share: of the batch.
            scores: shape ``(m,)``.
        """
        self._parts.append((share, scores))

    def mean(self) -> Vector | None:
        """The mean over the points, shape ``(m,)``; ``None`` where there are none."""
        if not self.points:
            return None
        # Divided first, so that finite scores have a finite mean.
        return np.sum([scores / len(self.points) for _, scores in self.points], axis=0)

    def standard_errors(self) -> Vector | None:
        """The standard error of the mean score of every domain.

        Scores grow in proportion to the number of steps that the traces look back over, so the noise of k points
        after ``t_i`` steps is what is left of them besides that growth, ``r_i = h_i - t_i sum h / sum t``, and the
        standard error is ``sqrt(sum_i r_i^2 / (k (k - 1)))``. It contains the noise of the iterates and of the
        validation batches, not that of the traces, which the points share. Of one point that was computed in k
        parts with shares ``s_i`` it is ``sqrt(k / (k - 1) * sum_i s_i^2 (h_i - h)^2)``, the noise of its batch
        alone.

        Returns:
            Shape ``(m,)``; ``None`` where there are no two points or parts, no point is left, or they are too
            large.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if len(self.points) > 1:
                steps = np.array([[float(step)] for step, _ in self.points])
                scores = np.stack([one for _, one in self.points])
                left = scores - steps * (scores.sum(axis=0) / steps.sum())
                variance = (left**2).sum(axis=0) / (len(scores) * (len(scores) - 1))
            elif self.points and len(self._parts) > 1:
                shares = np.array([[share] for share, _ in self._parts])
                scores = np.stack([one for _, one in self._parts])
                mean = (shares * scores).sum(axis=0) / shares.sum()
                variance = (shares**2 * (scores - mean) ** 2).sum(axis=0) * len(scores) / (len(scores) - 1)
            else:
                return None
        return np.sqrt(variance) if np.isfinite(variance).all() else None

    def state(self) -> list[tuple[int, list[float]]]:
        """The points so far, as plain values."""
        return [(step, scores.tolist()) for step, scores in self.points]

    def load_state(self, state: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Take up the points.

        Args:
            state: what :meth:`state` gave.
        """
        self.points = [(int(step), np.array(scores, dtype=np.float64)) for step, scores in state]
