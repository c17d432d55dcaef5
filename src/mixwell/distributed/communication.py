"""The communication volume of distributed training in bytes: by formula, and counted.

The bytes of a collective are those of the tensor that a rank passes to it (all-reduce, reduce-scatter, broadcast)
or receives from it (all-gather); :meth:`Traffic.sent` converts them to bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

Strategy = Literal["ddp", "fsdp"]
# Prefixes of the dispatcher's names of collectives, and the index of the argument that is the full tensor
# (-1: the first argument is a shard, the second the number of shards).
_COLLECTIVES = {
    "c10d::allreduce": ("all_reduce", 0),
    "c10d::_allgather_base": ("all_gather", 0),
    "c10d::allgather": ("all_gather", 0),
    "c10d::_reduce_scatter_base": ("reduce_scatter", 1),
    "c10d::reduce_scatter": ("reduce_scatter", 1),
    "c10d::broadcast": ("broadcast", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_FLOAT64 = 8


@final
@dataclass(frozen=True)
class Traffic:
    """Bytes by kind of collective."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    broadcast: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) * factor for f in fields(self)})

    @property
    def total(self) -> float:
        """The sum, an all-reduce counted as a reduce-scatter and an all-gather."""
        return 2 * self.all_reduce + self.all_gather + self.reduce_scatter + self.broadcast

    def sent(self, world_size: int) -> float:
        """Return the bytes that each rank sends with ring algorithms, ``(R - 1) / R`` of the total."""
        return self.total * (world_size - 1) / world_size


@final
@dataclass(frozen=True)
class TrafficModel:
    """The communication of a training run with R ranks, by formula.

    Args:
        strategy: ``ddp`` (each rank has all parameters) or ``fsdp`` (``fully_shard``; layers are gathered for the
            forward and again for the backward pass).
        size: bytes of the trained parameters.
        tensors: the number of parameters.
        domains: m.
        world_size: R.
        mixed: whether a step is one batch of all domains (``mixer.batch``); otherwise one for each.
        projected: the numbers in a projected trace, 0 for traces of full size.
        preconditioned: whether the optimizer divides gradients by their running size, as Adam does.
        kept: bytes of the outermost layers, which ``fully_shard`` does not gather again for the backward pass.
        buffers: bytes of the model's buffers, which ``ddp`` broadcasts in every step.
    """

    strategy: Strategy
    size: int
    tensors: int
    domains: int
    world_size: int
    mixed: bool = False
    projected: int = 0
    preconditioned: bool = False
    kept: int = 0
    buffers: int = 0

    @property
    def plain_step(self) -> Traffic:
        """A step of plain training."""
        return self._averaged_gradient + Traffic(broadcast=self.buffers if self.strategy == "ddp" else 0)

    @property
    def step(self) -> Traffic:
        """A step with mixing: with ``ddp``, and with mixed batches, that of plain training.

        In batches by domain ``ddp`` also reduces which parameters have a gradient (a byte for each); ``fsdp``
        gathers and scatters for every domain, and reduces Adam's second moments.
        """
        if self.mixed:
            return self.plain_step
        if self.strategy == "ddp":
            return self.plain_step + Traffic(all_reduce=self.tensors)
        moments = 2 * _FLOAT64 * self.tensors if self.preconditioned and not self.projected else 0
        return self._averaged_gradient * self.domains + Traffic(all_reduce=moments)

    def round(self, *, parts: int = 1, points: int = 1) -> Traffic:
        """Return the traffic of a round in addition to its steps: validation gradients, scores, and one record.

        Args:
            parts: micro-batches of a validation gradient; ``ddp`` averages them at once.
            points: validation gradients of the round.
        """
        ddp = self.strategy == "ddp"
        validation = (self._averaged_gradient if ddp else self._averaged_gradient * parts) * points
        numbers = Traffic(
            all_reduce=((self.tensors if ddp else 0) + _FLOAT64 * self.domains) * points,
            all_gather=_FLOAT64 * self.world_size * (4 * self.domains + 5),
        )
        if not self.projected:
            return validation + numbers
        # The first step's gradient is compared with its reconstruction from the layers. Its shards, and the
        # validation gradient's for the scores and for the next round's projections, are gathered first.
        compared = 4 * self.projected * self.domains if self.mixed else 0
        gathered = 0 if ddp else (points + (2 if self.mixed else 1)) * self.size
        moments = 2 * _FLOAT64 * self.tensors * points if not ddp and self.preconditioned else 0
        return validation + numbers + Traffic(all_gather=gathered, all_reduce=compared + moments)

    def ratio(self, steps: int, *, parts: int = 1, points: int = 1) -> float:
        """Return the total of a round of ``steps`` steps over that of plain training; at least one."""
        mixing = self.step * steps + self.round(parts=parts, points=points)
        return mixing.total / (self.plain_step * steps).total

    @property
    def _averaged_gradient(self) -> Traffic:
        if self.strategy == "ddp":
            return Traffic(all_reduce=self.size)
        return Traffic(all_gather=2 * self.size - self.kept, reduce_scatter=self.size)


@final
class TrafficCounter(TorchDispatchMode):
    """Count the collectives of this rank in ``with TrafficCounter() as counter:``, also those of DDP and FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, float] = {}

    @property
    def traffic(self) -> Traffic:
        """The traffic so far."""
        return Traffic(**self._found)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Operations on DTensors come again, with their local shards.
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            name = func.name()
            found = next((kind for prefix, kind in _COLLECTIVES.items() if name.startswith(prefix)), None)
            if found is not None:
                kind, index = found
                size = sum(t.nbytes for t in tree_iter(args[max(index, 0)]) if isinstance(t, Tensor))
                self._found[kind] = self._found.get(kind, 0.0) + size * (args[1] if index < 0 else 1)
        return func(*args, **(kwargs or {}))
