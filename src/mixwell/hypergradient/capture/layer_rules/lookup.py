"""The rule of a module: registered for its type, recognized by its name, or the layer is run again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, LayerRule
from mixwell.hypergradient.capture.layer_rules.linear import TransposedLinearRule
from mixwell.hypergradient.capture.layer_rules.norm import NormRule
from mixwell.hypergradient.parameters import buffers_kept, cuda_devices


@final
class RecomputeRule(LayerRule):
    """A layer of another type, run again on the rows of each domain. It must treat rows independently."""

    @override
    def save_inputs(self, inputs: tuple[Any, ...], accumulator: GradientAccumulator) -> Any:
        if isinstance(inputs[0], Tensor):
            # Refuses a first dimension that is not that of the rows.
            accumulator.row_groups.per_row(inputs[0].unsqueeze(-1))
        return inputs

    @override
    def accumulate(self, saved: Any, gradient: Tensor, accumulator: GradientAccumulator) -> None:
        """Run a forward and a backward pass of this layer for each domain."""
        groups = accumulator.row_groups
        count = len(groups)

        def has_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] % count == 0

        def sort_rows(value: Any) -> Any:
            """Return ``(rows, positions, ...)`` in the order of the domains."""
            # Detached, so that the backward pass ends at this layer.
            return groups.sort_rows(value.detach().unflatten(0, (count, -1))) if has_rows(value) else value

        inputs, outputs = [(sort_rows(value), has_rows(value)) for value in saved], sort_rows(gradient)
        parameters = [getattr(self.module, name) for name in self.param_indices]
        # The additional passes must not change training: neither random numbers nor running statistics. Random
        # states are saved once for all domains, since that takes longer than running a small layer.
        with torch.random.fork_rng(cuda_devices(parameters)):
            for domain, begin, end in groups.slices:
                local = [value[begin:end].flatten(0, 1) if of_rows else value for value, of_rows in inputs]
                with buffers_kept(self.module):
                    with torch.enable_grad():
                        again = self.module(*local)
                    found = torch.autograd.grad(
                        again, parameters, outputs[begin:end].flatten(0, 1).to(again.dtype), allow_unused=True
                    )
                gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
                for index, one in zip(self.param_indices.values(), gradients, strict=True):
                    if one is not None:
                        accumulator.add_gradient(index, domain, one)


def rule_for(module: nn.Module, param_indices: Mapping[str, int]) -> LayerRule | None:
    """Return the rule of a module with trained parameters, ``None`` where its rows cannot be separated.

    A layer that only shares the name of a recognized one is found in the first step of a round, where the sums are
    compared with the gradient.
    """
    by_name = (one for one in (TransposedLinearRule, NormRule) if one.recognizes(module, param_indices))
    rule = LAYER_RULES.find(module) or next(by_name, None)
    if rule is not None and rule.supports(module):
        return rule(module, param_indices)
    mixes_rows = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
    # A module with submodules, such as the model itself, is too large to be run again for each domain.
    composed = any(True for _ in module.children())
    return None if mixes_rows or composed else RecomputeRule(module, param_indices)
