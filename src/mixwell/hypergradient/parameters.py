"""theta: the parameters that a run trains, with their names, and operations on all of their gradients."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.typing import Gradients


@final
@dataclass(frozen=True)
class Parameters:
    """The tensors that an optimizer trains, by name.

    Args:
        groups: for each tensor the index of its parameter group in the optimizer.
        model: the model of the parameters, with the buffers (running statistics) that probes must not change.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    groups: tuple[int, ...]
    model: nn.Module | None = None

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Parameters:
        """Return the parameters in the optimizer's order, with the model's names; tied weights are one tensor."""
        _expect_readable(model)
        # Parameters that FSDP2 has gathered are other tensors than those of the optimizer.
        distributed.reshard(model)
        known = {id(p): name for p, name in _named(model)}
        found: list[tuple[str, Tensor, int]] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"the optimizer trains a tensor of shape {tuple(parameter.shape)} (group {index}) "
                        "that is no parameter of the model; give the model that holds all trained parameters"
                    )
                if parameter.is_complex():
                    raise ValueError(f"parameter {known[id(parameter)]} is complex, which is not supported")
                found.append((known[id(parameter)], parameter, index))
        if not found:
            raise ValueError("the optimizer has no parameters")
        names, tensors, groups = zip(*found, strict=True)
        return cls(names, tensors, groups, model)

    def expect_all_of(self, optimizer: Optimizer) -> None:
        """Raise ``RuntimeError`` where parameters were added to the optimizer or removed from it."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != len(self):
            raise RuntimeError(
                f"the optimizer has {count} parameters, but had {len(self)} when the mixer was made; make a new "
                "Mixer (weights=mixer.weights.last) after changing what is trained"
            )

    def untrained(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of the model that the optimizer does not have, with their names."""
        trained = {id(p) for p in self.tensors}
        named = [] if self.model is None else _named(self.model)
        return [(name, p) for p, name in named if id(p) not in trained]

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(p.numel() for p in self.tensors)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of every parameter, by name."""
        return {name: list(p.shape) for name, p in zip(self.names, self.tensors, strict=True)}

    def subset(self, indices: Sequence[int]) -> Parameters:
        """Return some of the parameters, in the order of the indices."""
        return Parameters(
            tuple(self.names[i] for i in indices),
            tuple(self.tensors[i] for i in indices),
            tuple(self.groups[i] for i in indices),
            self.model,
        )

    def take_gradients(self) -> Gradients:
        """Remove and return the gradients; the parameters have none afterwards."""
        gradients: Gradients = []
        for name, parameter in zip(self.names, self.tensors, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise ValueError(
                    f"parameter {name} has a sparse gradient, which is not supported; "
                    "use a dense one (nn.Embedding(..., sparse=False))"
                )
            gradients.append(gradient)
        self.clear_gradients()
        return gradients

    def clear_gradients(self) -> None:
        """Set every ``.grad`` to ``None``."""
        for parameter in self.tensors:
            parameter.grad = None

    def stray_gradient(self) -> str | None:
        """Return the name of a parameter that has a nonzero gradient already, if any."""
        for name, parameter in zip(self.names, self.tensors, strict=True):
            if parameter.grad is not None and bool(distributed.to_local(parameter.grad).any()):
                return name
        return None

    def non_finite(self, gradients: Gradients) -> str | None:
        """Return the name of the first parameter with NaN or infinity in its gradient, ``None`` if all are finite.

        It synchronizes with an accelerator once; only where :meth:`sum_of` is not finite (which may also be its
        overflow) the tensors are tested one by one.
        """
        if math.isfinite(float(self.sum_of(gradients))):
            return None
        present = ((n, g) for n, g in zip(self.names, gradients, strict=True) if g is not None)
        local = ((name, distributed.to_local(g)) for name, g in present)
        return next((name for name, g in local if not bool(torch.isfinite(g).all())), None)

    def sum_of(self, gradients: Gradients) -> Tensor:
        """Return the sum of all local gradients, a scalar on their device.

        It is finite only if all of them are, and is the cheapest test of that.
        """
        sums = [distributed.to_local(g.detach()).sum().float() for g in gradients if g is not None]
        if not sums:
            return torch.zeros((), device=self.device)
        return torch.stack([value.to(self.device) for value in sums]).sum()

    @cached_property
    def sharded(self) -> bool:
        """Whether the parameters and their gradients are sharded over processes (FSDP)."""
        return any(distributed.is_sharded(p) for p in self.tensors)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, which collectives use."""
        return self.tensors[0].device

    @contextmanager
    def full_precision(self) -> Generator[None]:
        """Disable gradient computation, and the autocast of the user's loop."""
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.no_grad(), torch.autocast(kind, enabled=False) if casts else nullcontext():
            yield

    def buffers_kept(self) -> AbstractContextManager[None]:
        """Restore the model's buffers afterwards, so that a probe of the model does not change it."""
        return nullcontext() if self.model is None else buffers_kept(self.model)


def local_products(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[float]:
    """Return ``<left_i, right_i>`` of the local shards for each pair of tensors, 0 where one is missing.

    It synchronizes with an accelerator once.
    """
    products: list[Tensor] = []
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            products.append(torch.zeros((), dtype=torch.float64))
            continue
        a, b = distributed.to_local(a.detach()), distributed.to_local(b.detach())
        # A sum of many terms overflows float16 and drowns in bfloat16.
        kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        products.append(torch.dot(a.flatten().to(kind), b.flatten().to(kind)).double())
    if not products:
        return []
    device = next((p.device for p in products if p.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([p.to(device) for p in products]).tolist()


def inner_products(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[float]:
    """Return ``<left_i, right_i>`` for each pair of tensors, 0 where one is missing.

    Both tensors of a pair are sharded in the same way. Where tensors are sharded, all processes must call it.
    """
    products = local_products(left, right)
    pairs = enumerate(zip(left, right, strict=True))
    present = [(i, a) for i, (a, b) in pairs if a is not None and b is not None]
    sharded = [(i, a) for i, a in present if distributed.is_sharded(a)]
    if sharded:
        local = np.array([products[i] * distributed.replication_weight(a) for i, a in sharded])
        summed = distributed.all_reduce_sum(local, sharded[0][1].device)
        for (i, _), product in zip(sharded, summed.tolist(), strict=True):
            products[i] = product
    return products


@contextmanager
def buffers_kept(model: nn.Module) -> Generator[None]:
    """Restore the buffers of a module and its submodules afterwards (running statistics, counters)."""
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                # One that was not changed may be saved for a backward pass, which fails after a write. BatchNorm
                # changes its statistics without raising their version, so the values are compared.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
                if getattr(module, name) is not buffer:  # replaced, not changed in place
                    setattr(module, name, buffer)


def cuda_devices(tensors: Iterable[Tensor]) -> list[int]:
    """Return the indices of the tensors' CUDA devices, whose random states a probe must not change."""
    return sorted({t.device.index for t in tensors if t.device.type == "cuda"})


def _expect_readable(model: nn.Module) -> None:
    """Raise ``ValueError`` for wrappers that flatten parameters or keep gradients to themselves."""
    # By name, since their modules take long to import.
    kinds = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) flattens the parameters, so that gradients cannot be mixed; use "
            "fully_shard (FSDP2): fsdp_version=2 in Accelerate, ModelParallelStrategy in Lightning"
        )
    if "DeepSpeedEngine" in kinds:
        raise ValueError(
            "DeepSpeed keeps the gradients to itself and cannot be mixed; use DistributedDataParallel or "
            "fully_shard"
        )


def _named(model: nn.Module) -> list[tuple[Tensor, str]]:
    """Return the parameters with their names, without the prefixes of compilation and data parallelism."""
    raw: list[tuple[Tensor, str]] = [(p, name) for name, p in model.named_parameters()]
    plain = [(p, name.replace("_orig_mod.", "")) for p, name in raw]
    if all(name.startswith("module.") for _, name in plain):
        plain = [(p, name.removeprefix("module.")) for p, name in plain]
    return plain if len({name for _, name in plain}) == len(raw) else raw
