"""Layers of any type: the gradients of their parameters from their own forward pass, domain by domain.

With the gradient dY of the outputs and ``dY_j``, its rows of domain j, domain j's gradient is the product
``dY_j (dY/dW)``, in one of two ways:

- the layer is run again on the rows of each domain, which all together cost one more forward and backward pass of
  it. Where the outputs are not those of the first pass (dropout, power iterations, inputs without rows), instead
- ``dY_j``, with zeros in all other rows, is propagated through the graph of the first pass, once per domain.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LayerCall, LayerRule
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import buffers_kept, cuda_devices
from mixwell.utils import nested

# Rows that are run again count as the same up to this times the square root of the machine epsilon: 9e-5 in
# float32, .02 in bfloat16. Dropout, or another step of a power iteration, is far above it.
SAME = 0.25
RANDOM_AND_SHARED = (
    "its layer runs several times in a forward pass, each with other random numbers or buffers"
)
PACKED = "the rows of a PackedSequence are not a dimension of it"


def in_backward() -> bool:
    """Return whether a backward pass is running: activation checkpointing then runs layers once more."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def domain_products(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    dims: Sequence[int],
    inputs: Sequence[Tensor],
    groups: RowGroups,
) -> list[tuple[int, list[Tensor | None]]]:
    """Return for each domain the product of ``dY_j`` with the derivative of the outputs by the inputs.

    Args:
        edges: the outputs, as they were in the forward pass: a model may have changed them in place.
        dims: the dimension of each output in which the rows are.
    """
    found: list[tuple[int, list[Tensor | None]]] = []
    for domain, begin, end in groups.slices:
        masked = [groups.mask(one, begin, end, dim=dim) for one, dim in zip(gradients, dims, strict=True)]
        found.append(
            (domain, list(torch.autograd.grad(edges, inputs, masked, retain_graph=True, allow_unused=True)))
        )
    return found


@dataclass(frozen=True)
class _SavedCall:
    call: LayerCall
    edges: Sequence[GradientEdge]


class RecomputeRule(LayerRule):
    """A layer of another type. It must treat rows independently."""

    parameter_names = None

    def __init__(self, module: nn.Module, param_indices: Mapping[str, int]) -> None:
        super().__init__(module, param_indices)
        self._repeatable = True
        self._calls = 0

    def begin_batch(self) -> None:
        """Forget the calls of the last batch."""
        self._calls = 0

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        raise AssertionError("save_call takes its place")

    @override
    def save_call(self, call: LayerCall, accumulator: GradientAccumulator) -> Any:
        if any(isinstance(one, PackedSequence) for one in (*call.args, *call.kwargs.values())):
            raise ValueError(PACKED)
        for output, dim in zip(call.outputs, self.row_dims(len(call.outputs)), strict=True):
            accumulator.row_groups.check_rows(output, dim)
        self._calls += not in_backward()
        return _SavedCall(call, [get_gradient_edge(one) for one in call.outputs])

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        self.accumulate_call(saved, [gradient], accumulator)

    @override
    def accumulate_call(
        self, saved: Any, gradients: Sequence[Tensor | None], accumulator: GradientAccumulator
    ) -> None:
        # An optimizer may have frozen parameters as well.
        named = ((i, self.module.get_parameter(name)) for name, i in self.param_indices.items())
        trained = {index: parameter for index, parameter in named if parameter.requires_grad}
        parameters = list(trained.values())
        if not parameters:
            return
        found = self._repeat(saved.call, gradients, parameters, accumulator.row_groups)
        if found is None:
            # The graph of an earlier call would be propagated through as well, and counted twice.
            if self._calls > 1:
                raise ValueError(RANDOM_AND_SHARED)
            wanted = [i for i, one in enumerate(gradients) if one is not None]
            dims = self.row_dims(len(gradients))
            found = domain_products(
                [saved.edges[i] for i in wanted],
                [cast("Tensor", gradients[i]) for i in wanted],
                [dims[i] for i in wanted],
                parameters,
                accumulator.row_groups,
            )
        for domain, products in found:
            for index, gradient in zip(trained, products, strict=True):
                if gradient is not None:
                    accumulator.add_gradient(index, domain, gradient)

    def input_row_dims(self, call: LayerCall) -> tuple[list[int | None], dict[str, int | None]] | None:
        """Return the dimension of the rows in each argument, ``None`` for all to be found by their size."""
        return None

    def _repeat(
        self,
        call: LayerCall,
        gradients: Sequence[Tensor | None],
        parameters: Sequence[Tensor],
        groups: RowGroups,
    ) -> list[tuple[int, list[Tensor | None]]] | None:
        """Run the layer again on the rows of each domain; ``None`` where that gives other outputs."""
        if not (self._repeatable and _is_plain((call.args, dict(call.kwargs)))):
            return None
        self._repeatable = False
        dims, wanted = (
            self.row_dims(len(gradients)),
            [i for i, one in enumerate(gradients) if one is not None],
        )
        runs: list[tuple[list[Tensor], list[Tensor]]] = []
        apart = size = torch.zeros((), dtype=torch.float64)
        with _kept(self.module, parameters) as draws:
            for _, begin, end in groups.slices:
                args, kwargs = self._take_inputs(call, groups, begin, end)
                try:
                    again = [one for one in nested.tensors(self.module(*args, **kwargs)) if one.requires_grad]
                except Exception:  # of any kind: inputs were sliced that are not rows
                    return None
                if len(again) != len(call.outputs):
                    return None
                rows = [groups.take(call.outputs[i].detach(), begin, end, dim=dims[i]) for i in wanted]
                again = [again[i] for i in wanted]
                if any(one.shape != other.shape for one, other in zip(again, rows, strict=True)):
                    return None
                for one, other in zip(again, rows, strict=True):
                    apart = apart + (one.detach() - other).double().square().sum().to(apart.device)
                    size = size + other.double().square().sum().to(size.device)
                taken = [
                    groups.take(cast("Tensor", gradients[i]), begin, end, dim=dims[i]).to(one.dtype)
                    for i, one in zip(wanted, again, strict=True)
                ]
                runs.append((again, taken))
            # Equal outputs do not show it: where a zero multiplies the result of dropout, as in LoRA at first.
            if draws():
                return None
        tolerance = SAME * torch.finfo(call.outputs[0].dtype).eps ** 0.5
        if not float(apart) <= tolerance**2 * float(size):
            return None
        self._repeatable = True
        return [
            (domain, list(torch.autograd.grad(again, parameters, taken, allow_unused=True)))
            for (domain, _, _), (again, taken) in zip(groups.slices, runs, strict=True)
        ]

    def _take_inputs(
        self, call: LayerCall, groups: RowGroups, begin: int, end: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a domain's rows, detached, so that the backward pass ends at this layer."""

        def take(value: Any, dim: int | None) -> Any:
            def take_rows(tensor: Tensor) -> Tensor:
                found = dim is not None and groups.has_rows(tensor, dim)
                return groups.take(tensor.detach(), begin, end, dim=dim or 0) if found else tensor.detach()

            return nested.map_tensors(take_rows, value)

        dims = self.input_row_dims(call)
        positional, named = dims or ([0] * len(call.args), dict.fromkeys(call.kwargs, 0))
        args = tuple(take(value, dim) for value, dim in zip(call.args, positional, strict=True))
        return args, {name: take(value, named[name]) for name, value in call.kwargs.items()}


@contextmanager
def _kept(module: nn.Module, parameters: Sequence[Tensor]) -> Generator[Callable[[], bool]]:
    """Restore what additional passes of a layer change, since they must not change training.

    Random states are saved once for all domains, since that takes longer than running a small layer.

    Yields:
        A function that returns whether random numbers were drawn.
    """
    devices, attributes = cuda_devices(parameters), dict(vars(module))
    with torch.random.fork_rng(devices), buffers_kept(module), torch.enable_grad():
        before = _random_states(devices)
        try:
            yield lambda: not all(map(torch.equal, before, _random_states(devices)))
        finally:
            vars(module).clear()
            vars(module).update(attributes)


def _random_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _is_plain(value: Any) -> bool:
    """Return whether a call with these values changes nothing else, such as a cache of keys and values."""
    if isinstance(value, Mapping):
        return all(_is_plain(one) for one in cast("Mapping[Any, Any]", value).values())
    if type(value) in (tuple, list):
        return all(_is_plain(one) for one in cast("Sequence[Any]", value))
    plain = Tensor | nn.Module | bool | int | float | str | torch.dtype | torch.device | None
    return isinstance(value, plain)
