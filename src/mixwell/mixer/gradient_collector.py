"""Blocks in which ``.backward()`` accumulates the gradient of one domain, of validation, or of a mixed batch."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.batch import DomainBatch
from mixwell.mixer.grad_scaler import refuse_grad_scaler
from mixwell.mixer.scopes import DomainScope

Versions = list[tuple[Tensor, int] | None]


@final
class GradientCollector:
    """Opens one block at a time, and refuses gradients from outside of it.

    Args:
        graphs: whether gradients come with their graph. PyTorch then warns of a reference cycle, which ends
            with the block, so the warning is silenced.
    """

    def __init__(self, parameters: Parameters, *, graphs: bool) -> None:
        self._parameters = parameters
        self._graphs = graphs
        self._open: str | None = None
        self._untrained = parameters.untrained()
        self._left: Versions | None = None  # the gradients that accumulate from block to block
        self._values: list[int] = []  # the versions of the parameters that they are of

    def expect_closed(self, call: str) -> None:
        """Raise a RuntimeError if a block is open."""
        if self._open is not None:
            raise RuntimeError(
                f"{call} was called inside the `with` block of {self._open!r}; call it after the block"
            )

    @contextmanager
    def collect(self, batch: DomainBatch, step: int) -> Generator[DomainScope]:
        """Collect what ``.backward()`` accumulates inside: the gradient of this rank's rows, where possible.

        Yields:
            The scope, which has the gradients when the block has ended.
        """
        name = batch.domain
        self.expect_ready(name)
        self._open = name
        scope = DomainScope(batch)
        others = _versions([p for _, p in self._untrained])
        try:
            with ExitStack() as stack:
                stack.enter_context(refuse_grad_scaler())
                if self._graphs:
                    stack.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
                stack.enter_context(distributed.no_sync(self._parameters.model))
                yield scope
            self._expect_trained(name, others)
            if batch.rank_scale != 1 and not scope.scaled:
                raise ValueError(
                    f"this rank has {batch.rank_scale:g} times as many rows of {name!r} as the mean of all "
                    "ranks, and its loss must be scaled by that: call scope.scaled_loss(loss).backward() in `with "
                    "mixer.domain(batch) as scope:`"
                )
            scope.gradients = self._parameters.take_gradients()
        finally:
            self._open = None
            self._parameters.clear_gradients()
        if all(g is None for g in scope.gradients):
            raise _no_gradient(name, step)

    @contextmanager
    def accumulate(self, name: str, step: int) -> Generator[None]:
        """Let ``.backward()`` accumulate inside, on the parameters themselves; after :meth:`expect_ready`."""
        self._open = name
        before, others = _versions(self._parameters.tensors), _versions([p for _, p in self._untrained])
        try:
            with refuse_grad_scaler():
                yield
            self._expect_trained(name, others)
            # With fully_shard there may be none before the last micro-batch of a step, when gradients are reduced.
            if not self._parameters.sharded and _changed(before, self._parameters.tensors) is None:
                raise _no_gradient(name, step)
            self.note_gradients()
        finally:
            self._open = None

    def note_gradients(self) -> None:
        """Keep which gradients there are, so that :meth:`expect_untouched` sees where one changes."""
        self._left = _versions(self._parameters.tensors)
        self._values = self._value_versions()

    def forget_gradients(self) -> None:
        """Expect no gradients between the blocks from now on."""
        self._left = None

    def expect_untouched(self, call: str) -> None:
        """Raise a RuntimeError if a gradient was added or changed outside of the blocks.

        It compares the version counters of the gradients, without reading them.
        """
        if self._left is None:
            index = next((i for i, p in enumerate(self._parameters.tensors) if _has_gradient(p)), None)
        else:
            index = _changed(self._left, self._parameters.tensors)
            moved = zip(self._parameters.names, self._values, self._value_versions(), strict=True)
            stepped = next((name for name, before, now in moved if before != now), None)
            if stepped is not None:
                raise RuntimeError(
                    f"parameter {stepped} was changed between the batch and {call}, which would step again with "
                    "the same gradient: call mixer.step() instead of optimizer.step(), or mixer.before_step() and "
                    "mixer.after_step() around it"
                )
        if index is None:
            return
        raise RuntimeError(
            f"the gradient of parameter {self._parameters.names[index]} was changed outside of the mixer's blocks "
            f"before {call}, which would be lost or not accounted for. Compute a loss of no domain in `with "
            "mixer.auxiliary():`, clip with Mixer(clip_norm=...) instead of clip_grad_norm_, and call "
            "optimizer.zero_grad() nowhere in a step"
        )

    def _value_versions(self) -> list[int]:
        return [distributed.to_local(p)._version for p in self._parameters.tensors]

    def _expect_trained(self, name: str, before: Versions) -> None:
        """Raise a ValueError if a parameter that the optimizer lacks has got a gradient in a block."""
        tensors = [p for _, p in self._untrained]
        found = [
            i for i in range(len(tensors)) if _changed(before[i : i + 1], tensors[i : i + 1]) is not None
        ]
        if not found:
            return
        for i in found:
            if before[i] is None:
                tensors[i].grad = None
        shown = ", ".join(self._untrained[i][0] for i in found[:5]) + (", ..." if len(found) > 5 else "")
        raise ValueError(
            f"{len(found)} parameters that the optimizer does not have got a gradient in the block of {name!r}, "
            f"without the weights of the domains: {shown}. Give them to the optimizer before Mixer(...) is made, "
            "or freeze them with requires_grad_(False); a mixer trains with one optimizer"
        )

    def expect_gradient(self, name: str, step: int) -> None:
        """Raise a ValueError if no parameter has a gradient."""
        if all(p.grad is None for p in self._parameters.tensors):
            raise _no_gradient(name, step)

    def expect_ready(self, name: str, *, first: bool = True) -> None:
        """Raise a RuntimeError if a block cannot be opened.

        Args:
            first: whether gradients must not be accumulated to earlier ones.
        """
        self.expect_closed(f"the block of {name!r}")
        if not first:
            self.expect_untouched(f"the block of {name!r}")
            return
        stray = self._parameters.stray_gradient()
        if stray is not None:
            raise RuntimeError(
                f"parameter {stray} has a gradient before the block of {name!r} begins; it would be counted "
                "as part of it. Call .backward() inside the mixer's blocks only, or optimizer.zero_grad() "
                "before them"
            )
        self._parameters.clear_gradients()
        self.forget_gradients()


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(distributed.to_local(parameter.grad).any())


def _versions(tensors: Sequence[Tensor]) -> Versions:
    """Return the gradients with their version counters, which every change in place raises."""
    return [None if p.grad is None else (p.grad, distributed.to_local(p.grad)._version) for p in tensors]


def _changed(before: Versions, tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor with another gradient than before."""
    for index, (old, new) in enumerate(zip(before, _versions(tensors), strict=True)):
        same = old is new if old is None or new is None else old[0] is new[0] and old[1] == new[1]
        if not same:
            return index
    return None


def _no_gradient(name: str, step: int) -> ValueError:
    return ValueError(
        f"{name!r} left no gradient on any trained parameter (step {step}): call loss.backward() "
        "inside the block, on a batch that is not empty"
    )
