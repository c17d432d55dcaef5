"""How many bytes the processes of a training exchange: by formula, and counted.

The bytes of an exchange are those of the tensor that a process gives to it (all-reduce, reduce-scatter, broadcast)
or gets from it (all-gather). What a process then sends is told by :meth:`Bytes.sent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Way = Literal["ddp", "fsdp"]
# Beginnings of the names under which PyTorch's dispatcher knows the exchanges, and which argument is the whole
# tensor (-1: the first one is a part of it, and the second tells of how many).
_KINDS = {
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
_NUMBER = 8


@final
@dataclass(frozen=True)
class Bytes:
    """Bytes by kind of exchange.

    Args:
        all_reduce: of sums that all processes get.
        all_gather: of tensors put together from all processes.
        reduce_scatter: of sums of which each process gets a part.
        broadcast: of tensors that all get from one.
    """

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    broadcast: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(**{one.name: getattr(self, one.name) * factor for one in fields(self)})

    @property
    def total(self) -> float:
        """All of them, an all-reduce counted as the reduce-scatter and the all-gather that it is made of."""
        return 2 * self.all_reduce + self.all_gather + self.reduce_scatter + self.broadcast

    def sent(self, processes: int) -> float:
        """What each process sends in rings, the least that is possible.

        Args:
            processes: R.

        Returns:
            ``(R - 1) / R`` of the total.
        """
        return self.total * (processes - 1) / processes


@final
@dataclass(frozen=True)
class Training:
    """A training in several processes, as far as its exchanges go.

    Args:
        way: ``ddp`` (each process has all parameters) or ``fsdp`` (``fully_shard``; layers are gathered for the
            forward and again for the backward pass).
        size: of the trained parameters, in bytes.
        tensors: how many parameters there are.
        domains: m.
        processes: R.
        mixed: whether a step is one batch of all domains (``mixer.batch``); else one for each.
        projected: numbers of a projected trace, where traces are projected; 0 for those of full size.
        preconditioned: whether the optimizer divides gradients by their running size, as Adam does.
        kept: of ``size`` what the outermost layers take, which ``fully_shard`` does not gather for the backward
            pass again.
        buffers: bytes of the model's buffers, which ``ddp`` takes from the first process in every step.
    """

    way: Way
    size: int
    tensors: int
    domains: int
    processes: int
    mixed: bool = False
    projected: int = 0
    preconditioned: bool = False
    kept: int = 0
    buffers: int = 0

    @property
    def _pass(self) -> Bytes:
        """A gradient, averaged over the processes."""
        if self.way == "ddp":
            return Bytes(all_reduce=self.size)
        return Bytes(all_gather=2 * self.size - self.kept, reduce_scatter=self.size)

    @property
    def plain_step(self) -> Bytes:
        """A step of plain training."""
        return self._pass + self._buffers

    @property
    def _buffers(self) -> Bytes:
        return Bytes(broadcast=self.buffers if self.way == "ddp" else 0)

    @property
    def step(self) -> Bytes:
        """A step with mixing: with ``ddp``, and with mixed batches, that of plain training.

        In batches by domain ``ddp`` also tells which parameters have a gradient (a byte for each); ``fsdp``
        gathers and scatters for every domain, and Adam's second moments are measured.
        """
        if self.mixed:
            return self.plain_step
        if self.way == "ddp":
            return self.plain_step + Bytes(all_reduce=self.tensors)
        measured = 2 * _NUMBER * self.tensors if self.preconditioned and not self.projected else 0
        return self._pass * self.domains + Bytes(all_reduce=measured)

    def round(self, *, parts: int = 1, points: int = 1) -> Bytes:
        """What a round has besides its steps: validation gradients, m numbers of scores for each, and one record.

        Args:
            parts: micro-batches of a validation gradient; ``ddp`` averages them at once.
            points: validation gradients of the round.

        Returns:
            The bytes.
        """
        flags = self.tensors if self.way == "ddp" else 0
        validation = (self._pass if self.way == "ddp" else self._pass * parts) * points
        numbers = Bytes(
            all_reduce=(flags + _NUMBER * self.domains) * points,
            all_gather=_NUMBER * self.processes * (4 * self.domains + 5),
        )
        if not self.projected:
            return validation + numbers
        # The first step's gradient is compared with what the layers saw of it. Parts of it, and of the validation
        # gradient for the scores and for the next round's projections, are put together first.
        compared = Bytes(all_reduce=4 * self.projected * self.domains if self.mixed else 0)
        gathered = 0 if self.way == "ddp" else (points + (2 if self.mixed else 1)) * self.size
        measured = 2 * _NUMBER * self.tensors * points if self.way == "fsdp" and self.preconditioned else 0
        return validation + numbers + compared + Bytes(all_gather=gathered, all_reduce=measured)

    def ratio(self, steps: int, *, parts: int = 1, points: int = 1) -> float:
        """What a round exchanges over what as many plain steps do.

        Args:
            steps: T.
            parts: micro-batches of a validation gradient.
            points: validation gradients of the round.

        Returns:
            At least one.
        """
        return (self.step * steps + self.round(parts=parts, points=points)).total / (
            self.plain_step * steps
        ).total


@final
class Counted(TorchDispatchMode):
    """Counts what this process exchanges in ``with Counted() as counted:``, also by DDP and FSDP themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, float] = {}

    @property
    def bytes(self) -> Bytes:
        """So far."""
        return Bytes(**self._found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an exchange, and let every operation be done.

        Args:
            func: the operation.
            types: of its tensors; those that are spread over processes come again in parts.
            args: of the operation.
            kwargs: of the operation.

        Returns:
            Its result.
        """
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            name = func.name()
            found = next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), None)
            if found is not None:
                kind, place = found
                size = sum(t.nbytes for t in tree_iter(args[max(place, 0)]) if isinstance(t, Tensor))
                self._found[kind] = self._found.get(kind, 0.0) + size * (args[1] if place < 0 else 1)
        return func(*args, **(kwargs or {}))
