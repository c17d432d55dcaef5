"""Blocks in which ``.backward()`` accumulates the gradient of one domain, of validation, or of a mixed batch."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import final

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.mixer.batch import DomainBatch
from mixwell.mixer.scopes import DomainScope


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
        try:
            with ExitStack() as stack:
                if self._graphs:
                    stack.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
                stack.enter_context(distributed.no_sync(self._parameters.model))
                yield scope
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
        try:
            yield
            # With fully_shard there may be none before the last micro-batch of a step, when gradients are reduced.
            if not self._parameters.sharded:
                self.expect_gradient(name, step)
        finally:
            self._open = None

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
            return
        stray = self._parameters.stray_gradient()
        if stray is not None:
            raise RuntimeError(
                f"parameter {stray} has a gradient before the block of {name!r} begins; it would be counted "
                "as part of it. Call .backward() inside the mixer's blocks only, or optimizer.zero_grad() "
                "before them"
            )
        self._parameters.clear_gradients()


def _no_gradient(name: str, step: int) -> ValueError:
    return ValueError(
        f"{name!r} left no gradient on any trained parameter (step {step}): call loss.backward() "
        "inside the block, on a batch that is not empty"
    )
