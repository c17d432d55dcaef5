"""Traces as full tensors, one per domain and parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import cast, final

import numpy as np
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.capture.hooks import CaptureContext, LayerHooks
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters, own_products
from mixwell.hypergradient.traces.base import Combined, StepModel, Traces, empty_trace
from mixwell.hypergradient.traces.mixed_batches import TraceAccumulator
from mixwell.typing import Gradients, Json, Vector

# Below this the scalar that stands for the decay is multiplied into the tensors, long before they overflow.
SMALLEST_SCALE = 1e-6


class FirstOrderTraces(Traces):
    """``z_j <- shrink * z_j + rate * P g_j``, one stored tensor per domain and parameter.

    A decay that is the same number for a whole tensor is not applied to it but kept in one scalar per
    parameter, shared by all domains: ``z = scale * stored``. So a step reads and writes each trace once, when
    its gradient is added.

    In several processes a trace is that of the process's own gradients, and its mean over the processes is looked
    at (all of this is linear in them); where parameters are spread, it is spread as they are.
    """

    supports_mixed_batches = True

    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        """Take ``m`` times the parameters' memory.

        Args:
            parameters: what is trained.
            domains: the number m.
            step: what a step does.
        """
        self._parameters = parameters
        self._stored = [[self._zeros(p) for p in parameters.tensors] for _ in range(domains)]
        self._scale = [1.0] * len(parameters)
        self._shrunk = [1.0] * len(parameters)
        self._empty = True
        self._step = step
        self._watcher: LayerHooks | None = None
        self._known: dict[int, str] | None = None

    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        """Set all traces to zero.

        Args:
            round_index: not used.
            validation: not used.
        """
        for trace in self._stored:
            for stored in trace:
                distributed.to_local(stored).zero_()
        self._scale = [1.0] * len(self._parameters)
        self._empty = True

    def begin_step(self, step: StepModel) -> None:
        """Fade all traces.

        Args:
            step: what the step does.
        """
        self._step = step
        for index in range(len(self._parameters)):
            shrink = step.shrink(index)
            self._shrunk[index] = 1.0
            if not isinstance(shrink, Tensor) and shrink > 0:
                self._shrunk[index] = shrink
                self._scale[index] *= shrink
                if self._scale[index] >= SMALLEST_SCALE:
                    continue
                shrink = 1.0
            factor = shrink * self._scale[index]
            factor = distributed.to_local(factor) if isinstance(factor, Tensor) else factor
            for trace in self._stored:
                self._fade(distributed.to_local(trace[index]), factor)
            self._scale[index] = 1.0

    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        """``stored_j += rate * scale * P g_j / decay``.

        Args:
            domain: which.
            gradients: its gradient.
            scale: its factor.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.fold(domain, index, gradient, scale)

    def fold(
        self, domain: int, index: int, gradient: Tensor, scale: float, part: slice | None = None
    ) -> None:
        """``stored_j += rate * scale * P g_j / decay`` for one parameter.

        Args:
            domain: which.
            index: which parameter.
            gradient: its gradient.
            scale: its factor.
            part: of which rows of the parameter the gradient is; ``None`` for all.
        """
        rate = self._step.rate(index) * scale / self._scale[index]
        if not rate:
            return
        stored, precondition = self._stored[domain][index], self._step.responses[index].scale
        if distributed.is_sharded(stored):
            stored, gradient = distributed.to_local(stored), distributed.to_local(gradient)
            precondition = None if precondition is None else distributed.to_local(precondition)
        if part is not None:
            stored = stored[part]
            precondition = None if precondition is None else precondition[part]
        self._accumulate(stored, gradient, precondition, rate)

    @contextmanager
    def rows(self, segments: RowGroups, weights: Vector) -> Generator[CaptureContext]:
        """Fold in the gradients of a mixed batch, layer by layer as its backward pass comes to them.

        Parameters that hooks on layers do not cover are taken by one more backward pass for each domain. A
        gradient that is not finite is in the trace before it is seen, so that such a round ends without an update.

        Args:
            segments: which rows belong to which domain.
            weights: by which the losses of the rows are weighted, positive, shape ``(m,)``.

        Yields:
            What is to be told the weighted losses.

        Raises:
            ValueError: the parameters are spread over processes, so that no layer sees its own gradient.
        """
        if self._parameters.sharded:
            raise ValueError(
                f"{self!r} cannot tell a mixed batch apart where parameters are sharded (fully_shard): use "
                "Hypergradient(traces=ProjectedTraces()), or give one batch per domain (mixer.domain)"
            )
        if self._watcher is None:
            self._watcher = LayerHooks(self._parameters, rest="per-domain", check=True, known=self._known)
        with self._watcher.watch(TraceAccumulator(self, self._parameters, segments, weights)) as watch:
            yield watch

    def end_step(self, combined: Combined) -> None:
        """Correct what was assumed before the step.

        In the first step of a round all there is came in with this step's clipping, so the factor assumed for
        it is replaced by the true one. A parameter without any gradient is left alone by the optimizer, so its
        trace did not fade.

        Args:
            combined: what the optimizer is about to be given.
        """
        for index, gradient in enumerate(combined.gradients):
            if self._empty:
                self._scale[index] *= combined.clip / self._step.clip
            if gradient is None:
                self._scale[index] /= self._shrunk[index]
        self._empty = False

    def dot(self, vector: Gradients) -> Vector:
        """``<vector, z_j>``: what the processes have of it, added up.

        Args:
            vector: one tensor per parameter.

        Returns:
            Shape ``(m,)``.
        """
        shares = [distributed.replication_weight(p) for p in self._parameters.tensors]
        factors = np.multiply(self._scale, shares)
        own = np.array([np.dot(own_products(vector, trace), factors) for trace in self._stored])
        return distributed.all_reduce_sum(own, self._parameters.device)

    @property
    def nbytes(self) -> int:
        """The memory of all stored tensors."""
        return sum(distributed.to_local(stored).nbytes for trace in self._stored for stored in trace)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """The stored tensors and their scalars."""
        tensors = {
            f"{domain}.{name}": stored
            for domain, trace in enumerate(self._stored)
            for name, stored in zip(self._parameters.names, trace, strict=True)
        }
        scale = dict(zip(self._parameters.names, self._scale, strict=True))
        # A batch that is looked at for the first time is added up in another order.
        found = self._known if self._watcher is None else self._watcher.checked
        names = self._parameters.names
        known = None if found is None else {names[index]: reason for index, reason in found.items()}
        return {"scale": scale, "empty": self._empty, "uncovered": known}, tensors

    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        """Take up tensors and scalars.

        Args:
            values: the scalars.
            tensors: the traces.
        """
        scale = cast("dict[str, float]", values["scale"])
        self._scale = [float(scale[name]) for name in self._parameters.names]
        self._empty = bool(values["empty"])
        known = cast("dict[str, str] | None", values.get("uncovered"))
        names = self._parameters.names
        self._watcher = None
        self._known = None if known is None else {names.index(name): why for name, why in known.items()}
        for domain, trace in enumerate(self._stored):
            for name, stored in zip(self._parameters.names, trace, strict=True):
                stored.copy_(distributed.distribute_like(tensors[f"{domain}.{name}"], stored))

    @abstractmethod
    def _zeros(self, parameter: Tensor) -> Tensor:
        """The empty trace of a parameter."""

    def _fade(self, stored: Tensor, factor: float | Tensor) -> None:
        """``stored *= factor``."""
        stored.mul_(factor)

    @abstractmethod
    def _accumulate(self, stored: Tensor, gradient: Tensor, precondition: Tensor | None, rate: float) -> None:
        """``stored += rate * P gradient``."""


@final
class DenseTraces(FirstOrderTraces):
    """Traces in float32 (float64 for float64 parameters): exact up to rounding, m times the parameters."""

    def __repr__(self) -> str:
        return "DenseTraces()"

    def _zeros(self, parameter: Tensor) -> Tensor:
        return empty_trace(parameter)

    def _accumulate(self, stored: Tensor, gradient: Tensor, precondition: Tensor | None, rate: float) -> None:
        if precondition is None:
            stored.add_(gradient, alpha=rate)
        else:
            stored.addcmul_(gradient, precondition, value=rate)
