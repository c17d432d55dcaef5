"""The verification of layers: does the gradient of a row's loss stay in that row?

One backward pass of the losses of one domain shows it: the gradient of a layer's output must be zero in all other
rows. A layer is verified in the first batch in which it is run and has a gradient, for an expert that is rarely
chosen a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.direct_uses import DirectUse
from mixwell.hypergradient.capture.layer_rules import LayerRule
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Gradients
from mixwell.utils.user_warnings import warn_user

# The largest gradient of a row's loss in another row, relative to that in its own, before rows count as mixed.
MIXED = 1e-6
# A layer without a gradient in this many batches, each of another domain, is taken for verified.
TRIES = 8

Probe = Callable[[str, "LayerRule | DirectUse", Any, Sequence["Tensor | None"]], None]
"""Takes the name, the rule, what it saved and the gradients of the outputs."""


@final
class Verification:
    """Which layers and operations are verified, and which are to be in this batch.

    Args:
        enabled: whether anything is verified.
        left: the :attr:`left` of an earlier run.
    """

    def __init__(self, *, enabled: bool, left: Mapping[str, int]) -> None:
        self._enabled = enabled
        self.left: Mapping[str, int] = dict(left)
        """The batches that are left for a layer or an operation to have a gradient, 0 once it is verified."""
        self._pending: dict[str, frozenset[int]] = {}
        self.sources: set[int] = set()
        """The parameters of what is to be verified in this batch and has no input with a gradient."""
        self.probe: Probe | None = None
        """Takes the place of the accumulation while the backward pass of the verification runs."""

    @property
    def is_due(self) -> bool:
        """Whether the batch has anything to verify."""
        return bool(self._pending)

    def begin_batch(self) -> None:
        """Forget what the last batch has not verified."""
        self._pending = {}
        self.sources = set()

    def required(self, name: str) -> bool:
        """Return whether a layer or an operation is not verified."""
        return self._enabled and self.left.get(name, TRIES) > 0

    def add(self, name: str, param_indices: Iterable[int], *, source: bool = False) -> None:
        """Record that a layer or an operation, with its parameters, is part of this batch.

        Args:
            source: none of its inputs has a gradient, so that only that of its parameters passes through it.
        """
        if self.required(name):
            self._pending[name] = frozenset(param_indices)
            if source:
                self.sources.update(param_indices)

    def take_pending(self) -> dict[str, frozenset[int]]:
        """Return the parameters of what is to be verified, by name, and count this as one try."""
        pending, self._pending = self._pending, {}
        self.left = {**self.left, **{name: self.left.get(name, TRIES) - 1 for name in pending}}
        return pending

    def accept(self, names: Iterable[str]) -> None:
        """Record that layers and operations are verified."""
        self.left = {**self.left, **dict.fromkeys(names, 0)}

    def choose_domain(self, groups: RowGroups, pending: Iterable[str]) -> int:
        """Return the domain of which the losses are differentiated: another one for each try."""
        tries = max(TRIES - 1 - self.left[name] for name in pending)
        return groups.slices[tries % len(groups.slices)][0]

    def differentiate(
        self,
        losses: Tensor,
        parameters: Parameters,
        indices: Sequence[int],
        accumulator: GradientAccumulator,
        probe: Probe,
    ) -> Gradients | None:
        """Return the gradients of some parameters; ``None`` where that is not possible."""
        # Fused layers, which are verified, add nothing.
        self.probe, accumulator.paused = probe, True
        wanted = [parameters.tensors[index] for index in indices]
        try:
            found = torch.autograd.grad(losses.sum(), wanted, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            warn_user(
                "whether rows are independent cannot be verified through reentrant activation checkpointing; use "
                "checkpoint(..., use_reentrant=False)"
            )
            return None
        finally:
            self.probe, accumulator.paused = None, False
        gradients: Gradients = [None] * len(parameters)
        for index, gradient in zip(indices, found, strict=True):
            gradients[index] = gradient
        return gradients


def rows_with_gradient(
    gradients: Sequence[Tensor | None], dims: Sequence[int], chosen: Tensor, groups: RowGroups
) -> tuple[bool, bool]:
    """Return whether outputs have a gradient in any row, and in rows other than the chosen ones.

    Args:
        dims: the dimension of each output in which the rows are.
        chosen: shape ``(rows,)``.
    """
    known: list[Tensor] = []
    for one, dim in zip(gradients, dims, strict=True):
        if one is not None and one.numel():
            # Not of absolute values, which would take the memory of a large activation.
            least, most = groups.per_row(one.movedim(dim, 0).unsqueeze(-1)).flatten(1).aminmax(dim=1)
            known.append(torch.maximum(-least, most))
    largest = [float(sizes.max()) for sizes in known]
    elsewhere = any(
        float(sizes[~chosen].max()) > MIXED * most for sizes, most in zip(known, largest, strict=True)
    )
    return any(most > 0 for most in largest), elsewhere
