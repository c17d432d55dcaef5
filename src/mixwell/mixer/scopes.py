"""Blocks in which ``.backward()`` collects the gradient of one domain, or of validation."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor

from mixwell import distributed
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Gradients


@final
class Scope:
    """What ``with mixer.domain(...) as scope`` gives: a place to tell the loss.

    Args:
        portion: by which the loss counts, where processes have different numbers of rows.
    """

    def __init__(self, portion: float = 1.0) -> None:
        self.portion = portion
        """By which the loss counts; see :attr:`mixwell.Mixer.portions`."""
        self.weighed = False
        """Whether :meth:`weigh` was called."""
        self.loss: Tensor | None = None
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        """What was told: losses, and those of a reference model on the same."""
        self.gradients: Gradients = []

    def record_loss(self, loss: Tensor | float, *, reference: Tensor | float | None = None) -> None:
        """Tell the loss, so that it is in the records and its being finite is checked; some signals live by it.

        Args:
            loss: the mean loss, or the losses of the rows (or tokens), whose mean is recorded. Of several in one
                scope the sum is recorded, as their gradients add up.
            reference: the losses of a reference model on the same, of the same shape, for signals that need it.

        Raises:
            ValueError: there is no loss, or the reference has another shape.
        """
        losses = torch.as_tensor(loss).detach()
        if not losses.numel():
            raise ValueError("observe takes the mean loss or the losses of rows; got none")
        other = None if reference is None else torch.as_tensor(reference).detach().to(losses)
        if other is not None and other.shape != losses.shape:
            raise ValueError(
                f"the losses have shape {tuple(losses.shape)}, those of the reference model "
                f"{tuple(other.shape)}; both must be of the same rows"
            )
        self.losses.append((losses, other))
        mean = losses.mean() if losses.is_floating_point() else losses.double().mean()
        self.loss = mean if self.loss is None else self.loss + mean

    def scaled_loss(
        self, loss: Tensor, *, reference: Tensor | float | None = None, objective: Tensor | None = None
    ) -> Tensor:
        """Tell the mean loss, and get what to call ``.backward()`` on: the loss times the process's portion.

        Needed where processes have different numbers of rows of a domain (:attr:`mixwell.Mixer.portions`);
        elsewhere it is the loss itself.

        Args:
            loss: the mean loss of the rows that are computed here.
            reference: as in :meth:`record_loss`.
            objective: what is to be made less in place of the loss.

        Returns:
            One number.
        """
        self.record_loss(loss, reference=reference)
        self.weighed = True
        less = loss if objective is None else objective
        return less if self.portion == 1 else less * self.portion

    def told(self) -> tuple[Tensor, Tensor | None]:
        """The losses that were told, and those of a reference model; of several the sums of their means.

        Returns:
            Both.
        """
        if len(self.losses) == 1:
            return self.losses[0]
        others = [other.float().mean() for _, other in self.losses if other is not None]
        means = torch.stack([losses.float().mean() for losses, _ in self.losses])
        return means.sum(), torch.stack(others).sum() if len(others) == len(means) else None


@final
class Scopes:
    """Opens one scope at a time, and sees to it that no gradient strays into another.

    Args:
        parameters: whose gradients are collected.
        graphs: whether gradients come with their graph. PyTorch then warns of a reference cycle, which ends
            with the block, so the warning is silenced.
    """

    def __init__(self, parameters: Parameters, *, graphs: bool) -> None:
        self._parameters = parameters
        self._graphs = graphs
        self._open: str | None = None

    def expect_closed(self, call: str) -> None:
        """Refuse a call inside a scope.

        Args:
            call: what was called.

        Raises:
            RuntimeError: a scope is open.
        """
        if self._open is not None:
            raise RuntimeError(
                f"{call} was called inside the `with` block of {self._open!r}; call it after the block"
            )

    @contextmanager
    def collect(self, name: str, step: int, *, portion: float = 1.0) -> Generator[Scope]:
        """Collect what ``.backward()`` accumulates inside: the gradient of this process's rows, where possible.

        Args:
            name: whose gradient it is.
            step: the number of the step, for messages.
            portion: by which the loss counts, where processes have different numbers of rows.

        Yields:
            The scope; its gradients are there when the block has ended.

        Raises:
            RuntimeError: another scope is open, or there are gradients from before.
            ValueError: there is no gradient when the block ends, or the loss was not weighed.
        """
        self.expect_closed(f"the block of {name!r}")
        self._expect_no_gradients(name)
        self._open = name
        scope = Scope(portion)
        try:
            with ExitStack() as stack:
                if self._graphs:
                    stack.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
                stack.enter_context(distributed.no_sync(self._parameters.model))
                yield scope
            if portion != 1 and not scope.weighed:
                raise ValueError(
                    f"this process has {portion:g} times as many rows of {name!r} as processes have in the mean, "
                    "and its loss counts so much: call scope.scaled_loss(loss).backward() in "
                    f"`with mixer.domain({name!r}) as scope:`"
                )
            scope.gradients = self._parameters.take_gradients()
        finally:
            self._open = None
            self._parameters.clear_gradients()
        if all(g is None for g in scope.gradients):
            raise _no_gradient(name, step)

    @contextmanager
    def accumulate(self, name: str, step: int, *, first: bool) -> Generator[None]:
        """Let ``.backward()`` accumulate inside, on the parameters themselves.

        Args:
            name: what is computed, for messages.
            step: the number of the step, for messages.
            first: whether it is the first of the step, before which there must be no gradients.

        Yields:
            Nothing. Where the block fails, the parameters have no gradients afterwards.

        Raises:
            ValueError: there is no gradient when the block ends, where that can be known then.
        """
        self.expect_closed(f"the block of {name!r}")
        if first:
            self._expect_no_gradients(name)
        self._open = name
        try:
            yield
            # Parameters of fully_shard may have none before the last micro-batch of a step, when it is exchanged.
            if not self._parameters.sharded:
                self.expect_gradient(name, step)
        except BaseException:
            self._parameters.clear_gradients()
            raise
        finally:
            self._open = None

    def expect_gradient(self, name: str, step: int) -> None:
        """Refuse a step that no parameter has a gradient of.

        Args:
            name: what was computed, for the message.
            step: the number of the step, for the message.

        Raises:
            ValueError: there is none.
        """
        if all(p.grad is None for p in self._parameters.tensors):
            raise _no_gradient(name, step)

    def _expect_no_gradients(self, name: str) -> None:
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
