"""Traces as full tensors: ``z_j <- shrink * z_j + rate * P g_j`` for each domain and parameter."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from typing import cast, final

import torch
from torch import Tensor
from typing_extensions import override

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import DenseAccumulator
from mixwell.hypergradient.capture.hooks import CaptureContext, HookFindings, LayerHooks
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import (
    TRACES,
    Combined,
    StepModel,
    Traces,
    TracesConfig,
    empty_trace,
    full_products,
)
from mixwell.hypergradient.traces.clipping import GradientSketches, sketch_bytes
from mixwell.hypergradient.traces.selection import Only, Selection
from mixwell.typing import Gradients, Json, Vector

# Below this the scalar that stands for the decay is multiplied into the tensors, long before they overflow.
SMALLEST_SCALE = 1e-6


@final
class DenseTraces(Traces):
    """One tensor per domain and parameter.

    By default in float32 (float64 for float64 parameters): exact up to rounding, m times the parameters. In
    bfloat16 they take half of the memory; stochastic rounding keeps them unbiased, where rounding to nearest would
    lose every term below 1/512 of the sum.

    A decay that is the same number for a whole tensor is not applied to it but kept in one scalar per
    parameter, shared by all domains: ``z = scale * stored``. So a step reads and writes each trace once, when
    its gradient is added.

    In distributed training each process holds the trace of its local gradients, and ``dot`` averages over
    processes. Traces of sharded parameters are sharded in the same way.

    Args:
        dtype: ``torch.bfloat16``, or ``None`` for float32 or better.
        only: the parameters that have traces, by names or shell patterns (``"head.*"``) or a function of the name;
            the others count as if they did not depend on the weights.
        seed: of the stochastic rounding.

    Example:
        >>> DenseTraces(dtype=torch.bfloat16, only=["head.*", "*.bias"])
        DenseTraces(dtype=torch.bfloat16, only=['head.*', '*.bias'])
    """

    supports_mixed_batches = True
    supports_skipping = True

    def __init__(self, *, dtype: torch.dtype | None = None, only: Only | None = None, seed: int = 0) -> None:
        if dtype not in (None, torch.bfloat16):
            raise ValueError(f"dtype must be torch.bfloat16, or None for float32 or better, got {dtype}")
        self.dtype, self.seed = dtype, seed
        self._selection = Selection(only)

    def __repr__(self) -> str:
        dtype = "" if self.dtype is None else f"dtype={self.dtype}"
        return f"DenseTraces({', '.join(filter(None, (dtype, str(self._selection))))})"

    @override
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        self._parameters = parameters = self._selection.bind(parameters)
        self._stored = [[empty_trace(p, self.dtype) for p in parameters.tensors] for _ in range(domains)]
        self._scale = [1.0] * len(parameters)
        self._shrunk = [1.0] * len(parameters)
        self._empty = True
        self._decayed = False
        self._step = self._selection.step(step)
        self._clipping = GradientSketches(parameters, domains)
        self._hooks: LayerHooks | None = None
        self._findings = HookFindings()
        self._captured: set[int] | None = None
        self._generators = {
            # Processes round independently, so that their errors average out.
            device: torch.Generator(device).manual_seed(self.seed + distributed.rank())
            for device in sorted({p.device for p in parameters.tensors}, key=str)
            if self.dtype is not None and device.type != "meta"  # where memory is only counted
        }

    @override
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        for trace in self._stored:
            for stored in trace:
                distributed.to_local(stored).zero_()
        self._scale = [1.0] * len(self._parameters)
        self._empty = True

    @override
    def begin_step(self, step: StepModel) -> None:
        # The traces decay with the first gradient, so that a step without any can be begun again.
        self._step, self._decayed = self._selection.step(step), False
        self._captured = None
        self._clipping.clear()

    @property
    @override
    def can_drop_step(self) -> bool:
        return not self._decayed

    @override
    def skip(self, step: StepModel, count: int) -> None:
        self._step = self._selection.step(step)
        self._shrink(count)

    def _decay(self) -> None:
        self._decayed = True
        self._shrink(1)

    def _shrink(self, count: int) -> None:
        """Multiply the traces by the factors of the step, ``count`` times."""
        for index in range(len(self._parameters)):
            shrink = self._step.shrink(index) ** count
            self._shrunk[index] = 1.0
            # Only a positive number can be kept apart from the tensor: later terms are divided by it.
            if not isinstance(shrink, Tensor) and shrink > 0:
                self._shrunk[index] = shrink
                self._scale[index] *= shrink
                if self._scale[index] >= SMALLEST_SCALE:
                    continue
                shrink = 1.0
            factor = shrink * self._scale[index]
            factor = distributed.to_local(factor) if isinstance(factor, Tensor) else factor
            for trace in self._stored:
                stored = distributed.to_local(trace[index])
                if self.dtype is None:
                    stored.mul_(factor)
                else:
                    self._round_into(stored, stored.float().mul_(factor))
            self._scale[index] = 1.0

    @override
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        for index, gradient in enumerate(self._selection.gradients(gradients)):
            if gradient is not None:
                self._add_gradient(domain, index, gradient, scale)

    def _add_gradient(
        self, domain: int, index: int, gradient: Tensor, scale: float, rows: slice | None = None
    ) -> None:
        """Add one parameter's gradient, or some of its rows, and sketch it for the derivative of clipping."""
        self._clipping.add(domain, index, gradient, scale, rows)
        self._add(domain, index, gradient, scale, rows)

    def _add(
        self, domain: int, index: int, gradient: Tensor, scale: float, rows: slice | None = None
    ) -> None:
        """``stored_j += rate * scale * P g_j / decay`` for one parameter, or some of its rows."""
        if not self._decayed:
            self._decay()
        # z = self._scale * stored, so a new term is divided by the decay that it will be multiplied by.
        rate = self._step.rate(index) * scale / self._scale[index]
        if not rate:
            return
        response = self._step.responses[index]
        diagonal = response.diagonal
        if diagonal is None:  # the identity, or a map that needs the whole gradient
            gradient = response.precondition(gradient)
        else:  # multiplied while the gradient is added, without a tensor for the product
            diagonal = distributed.to_local(diagonal)
        stored, gradient = distributed.to_local(self._stored[domain][index]), distributed.to_local(gradient)
        if rows is not None:
            stored, diagonal = stored[rows], None if diagonal is None else diagonal[rows]
        if self.dtype is not None:
            term = gradient if diagonal is None else gradient * diagonal
            self._round_into(stored, stored.float().add_(term, alpha=rate))
        elif diagonal is None:
            stored.add_(gradient, alpha=rate)
        else:
            stored.addcmul_(gradient, diagonal, value=rate)

    @override
    @contextmanager
    def capture(self, row_groups: RowGroups, weights: Vector) -> Generator[CaptureContext]:
        """Add the gradients of a mixed batch, layer by layer as its backward pass reaches them.

        Parameters that hooks on layers do not support are handled by one more backward pass for each domain. A
        gradient that is not finite is in the trace before it is seen, so that the round begins again after it.

        Yields:
            The context, which takes the weighted losses.
        """
        # Layers of sharded parameters see the gradients of gathered copies, which are not traced.
        if self._parameters.sharded:
            raise ValueError(
                f"{self!r} cannot separate a mixed batch of sharded parameters (fully_shard) by domain: use "
                "Hypergradient(traces=ProjectedTraces()), or give one batch per domain (mixer.domain)"
            )
        if self._hooks is None:
            self._hooks = LayerHooks(
                self._parameters, unsupported="per_domain", check=True, known=self._findings
            )
        responses = self._step.responses
        accumulator = DenseAccumulator(
            self._parameters,
            row_groups,
            weights,
            self._add_gradient,
            lambda index: responses[index].elementwise,
        )
        self._captured = accumulator.added = accumulator.added if self._captured is None else self._captured
        with self._hooks.capture(accumulator) as context:
            yield context

    @override
    def end_step(self, combined: Combined) -> None:
        """Differentiate clipping, and correct the assumptions that were made before the step.

        In the first step of a round the traces contain nothing but this step's gradients, so the clipping factor
        assumed for it is replaced by the true one. The optimizer does not change a parameter without any gradient,
        so its trace did not decay.
        """
        if self._captured is not None:
            self._expect_captured(self._selection.gradients(combined.of_domains()), self._captured)
        if not self._decayed:
            self._decay()
        gradients = self._selection.gradients(combined.gradients)
        self._differentiate_clipping(combined, gradients)
        for index, gradient in enumerate(gradients):
            if self._empty:
                self._scale[index] *= combined.clip / self._step.clip
            if gradient is None:
                self._scale[index] /= self._shrunk[index]
        self._empty = self._decayed = False

    def _expect_captured(self, gradients: Gradients, captured: Container[int]) -> None:
        """Report parameters with a gradient of which hooks saw nothing."""
        assert self._hooks is not None
        missing = [(i, g) for i, g in enumerate(gradients) if g is not None and i not in captured]
        self._hooks.report_unseen([i for i, gradient in missing if bool(gradient.any())])

    def _differentiate_clipping(self, combined: Combined, gradients: Gradients) -> None:
        """Subtract from every trace its part along the combined gradient, which clipping takes away."""
        for domain, along in enumerate(self._clipping.coefficients(combined, gradients) or ()):
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self._add(domain, index, gradient, -along)

    @override
    def dot(self, vector: Gradients) -> Vector:
        vector = self._selection.gradients(vector)
        return full_products(self._parameters, vector, self._stored, self._scale)

    @property
    @override
    def nbytes(self) -> int:
        traces = sum(distributed.to_local(stored).nbytes for trace in self._stored for stored in trace)
        return traces + self._clipping.nbytes

    @override
    def state(self) -> tuple[Json, dict[str, Tensor]]:
        names = self._parameters.names
        tensors = {
            f"{domain}.{name}": stored
            for domain, trace in enumerate(self._stored)
            for name, stored in zip(names, trace, strict=True)
        }
        for device, generator in self._generators.items():
            tensors[f"generator.{device}"] = generator.get_state()
        # The sums of a batch that is being verified run in another order, so a resumed run must not verify again.
        found = self._findings if self._hooks is None else self._hooks.findings
        scale = dict(zip(names, self._scale, strict=True))
        return {"scale": scale, "empty": self._empty, "hooks": found.to_json()}, tensors

    @override
    def load_state(self, values: Json, tensors: Mapping[str, Tensor]) -> None:
        names = self._parameters.names
        scale = cast("dict[str, float]", values["scale"])
        self._scale = [float(scale[name]) for name in names]
        self._empty = bool(values["empty"])
        self._hooks, self._findings = None, HookFindings.from_json(values["hooks"])
        for domain, trace in enumerate(self._stored):
            for name, stored in zip(names, trace, strict=True):
                stored.copy_(distributed.distribute_like(tensors[f"{domain}.{name}"], stored))
        for device, generator in self._generators.items():
            generator.set_state(tensors[f"generator.{device}"].cpu())

    def _round_into(self, stored: Tensor, value: Tensor) -> None:
        stored.copy_(round_stochastically(value, self._generators[stored.device]))


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 so that the expectation is the value.

    The lower 16 bits of a float32 are the part that bfloat16 cuts off. Adding a uniform 16-bit number carries
    into the upper bits with the probability of the value's distance from the lower of its two neighbors.
    """
    noise = torch.randint(
        0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    bits = value.contiguous().view(torch.int32) + noise
    return bits.bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


@final
@TRACES.register("dense")
class DenseTracesConfig(TracesConfig):
    """A copy of the parameters for every domain."""

    with_sharded_parameters = "sharded"

    @override
    def build(self) -> Traces:
        return DenseTraces()

    @override
    def least_bytes(self, parameters: int, domains: int) -> int:
        return 4 * parameters * domains

    @override
    def clipping_bytes(self, parameters: int, domains: int) -> int:
        return sketch_bytes(parameters, domains)


@final
@TRACES.register("bfloat16")
class Bfloat16TracesConfig(TracesConfig):
    """A copy of the parameters for every domain in bfloat16."""

    with_sharded_parameters = "sharded"

    @override
    def build(self) -> Traces:
        return DenseTraces(dtype=torch.bfloat16)

    @override
    def least_bytes(self, parameters: int, domains: int) -> int:
        return 2 * parameters * domains

    @override
    def clipping_bytes(self, parameters: int, domains: int) -> int:
        return sketch_bytes(parameters, domains)
