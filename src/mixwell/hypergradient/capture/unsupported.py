"""The parameters whose gradients hooks do not separate, and passes per domain in their place."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.findings import (
    IN_PLACE,
    NOT_SEEN,
    Unsupported,
    unseen_gradients,
    unsupported_warning,
)
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters
from mixwell.utils.user_warnings import warn_user


@final
class UnsupportedParameters:
    """The reason for each parameter whose gradients cannot be separated.

    Args:
        mode: whether they are ignored or handled by one more backward pass for each domain.
        changed_in_place: whether a parameter is part of a tensor that was changed in place.
    """

    def __init__(
        self, parameters: Parameters, mode: Unsupported, changed_in_place: Callable[[int], bool]
    ) -> None:
        self._parameters, self._changed_in_place = parameters, changed_in_place
        self.mode: Unsupported = mode
        self.reasons: dict[int, str] = {}
        """By index."""
        self.ignored: Container[int] = self.reasons
        """Those, and parameters that are frozen in this batch."""
        self._warned: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self.reasons

    def begin_batch(self) -> None:
        """Look for frozen parameters, which an optimizer may have as well."""
        frozen = (i for i, p in enumerate(self._parameters.tensors) if not p.requires_grad)
        self.ignored = ChainMap(self.reasons, dict.fromkeys(frozen, ""))

    def by_name(self) -> dict[str, str]:
        """Return the reasons by the names of the parameters."""
        return {self._parameters.names[index]: reason for index, reason in self.reasons.items()}

    def add(self, param_indices: Mapping[str, int], reason: str, accumulator: GradientAccumulator) -> None:
        """Add the parameters of a layer, and remove what was accumulated for them in this batch."""
        for index in param_indices.values():
            self.reasons.setdefault(index, reason)
            accumulator.discard(index)

    def compare(
        self,
        seen: Tensor,
        gradient: Tensor,
        projections: Projections,
        *,
        epsilon: float,
        without: Container[int] = (),
    ) -> list[int]:
        """Add parameters whose gradient the hooks did not see: they are used outside their layer.

        Args:
            seen: by the hooks, projected, by domain, shape ``(m, size)``.
            gradient: the sum over all domains, projected, shape ``(size,)``.
            epsilon: the machine epsilon of the lowest precision of the backward pass.
            without: parameters that are not compared.

        Returns:
            The indices of those that were not known before.
        """
        known = {i for i in range(len(self._parameters)) if i in self.reasons or i in without}
        found = unseen_gradients(seen, gradient, projections, known=known, epsilon=epsilon)
        self.reasons |= {i: IN_PLACE if self._changed_in_place(i) else why for i, why in found.items()}
        return list(found)

    def report_unseen(self, indices: Sequence[int], *, reentrant: bool) -> None:
        """Add parameters that have a gradient of which nothing was accumulated.

        Raises:
            ValueError: another pass for each domain would not, or did not, see it either.
        """
        hopeless = [i for i in indices if i in self.reasons or reentrant]
        if hopeless:
            names = ", ".join(self._parameters.names[i] for i in hopeless[:8])
            raise ValueError(
                f"the gradient of {names} cannot be separated by domain: it arises in reentrant activation "
                "checkpointing or in another way that hooks do not see; use checkpoint(..., use_reentrant=False), "
                "or give one batch per domain (mixer.domain)"
            )
        self.reasons |= dict.fromkeys(indices, NOT_SEEN)
        self.warn()

    def warn(self) -> None:
        """Warn of the parameters, once of each; raise ``ValueError`` where there are no others."""
        fresh = [i for i in self.reasons if i not in self._warned]
        if not fresh:
            return
        self._warned.update(fresh)
        warn_user(unsupported_warning(self._parameters, self.reasons, fresh, self.mode))

    def differentiate_by_domain(self, losses: Tensor, accumulator: GradientAccumulator) -> None:
        """Run one backward pass per domain over the parameters, and accumulate their gradients."""
        wanted = [(i, self._parameters.tensors[i]) for i in self.reasons]
        wanted = [(i, p) for i, p in wanted if p.requires_grad]
        if not wanted:
            return
        ordered = accumulator.row_groups.sort_rows(losses)
        accumulator.paused, accumulator.ignored = True, ()
        try:
            for domain, begin, end in accumulator.row_groups.slices:
                found = torch.autograd.grad(
                    ordered[begin:end].sum(), [p for _, p in wanted], retain_graph=True, allow_unused=True
                )
                gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
                for (index, _), gradient in zip(wanted, gradients, strict=True):
                    if gradient is not None:
                        accumulator.add_gradient(index, domain, gradient)
        finally:
            accumulator.paused, accumulator.ignored = False, self.ignored
