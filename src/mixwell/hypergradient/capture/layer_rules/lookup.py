"""The rule of a module: registered for its type, recognized by its name, or the layer is run again."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from mixwell.hypergradient.capture.layer_rules.base import LAYER_RULES, LayerRule
from mixwell.hypergradient.capture.layer_rules.linear import TransposedLinearRule
from mixwell.hypergradient.capture.layer_rules.norm import NormRule
from mixwell.hypergradient.capture.layer_rules.recompute import RecomputeRule

# Modules that hold the parameters of the module that they belong to.
CONTAINERS = (nn.ParameterList, nn.ParameterDict, ParametrizationList)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def layers_of(
    model: nn.Module, trained: Mapping[int, int]
) -> Generator[tuple[str, nn.Module, dict[str, int], LayerRule | None]]:
    """Yield each layer with trained parameters: its name, itself, its parameters and its rule.

    Args:
        trained: the index of each parameter by its ``id``.
    """
    covered: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in covered:
            continue
        own = _own_modules(module, covers=_covers_submodules(module))
        covered.update(id(one) for _, one in own)
        # With duplicates: a rule asks by name, and a layer may have two names for one tensor.
        param_indices = {
            prefix + key: trained[id(parameter)]
            for prefix, one in own
            for key, parameter in one.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in trained
        }
        if param_indices:
            yield name, module, param_indices, rule_for(module, param_indices)


def rule_for(module: nn.Module, param_indices: Mapping[str, int]) -> LayerRule | None:
    """Return the rule of a module with trained parameters, ``None`` where there is none.

    A layer that only shares the name of a recognized one is found in the first traced step of a round, where the
    sums are compared with the gradient.
    """
    by_name = (one for one in (TransposedLinearRule, NormRule) if one.recognizes(module, param_indices))
    rule = _registered(module) or next(by_name, None)
    if rule is not None and rule.supports(module) and _knows(rule, module, param_indices):
        return rule(module, param_indices)
    # A module with layers, such as the model itself, is too large to be run again for each domain.
    own = {id(one) for _, one in _own_modules(module)}
    layers = [one for one in module.modules() if id(one) not in own and one._parameters]  # pyright: ignore[reportPrivateUsage]
    return None if isinstance(module, BATCH_NORMS) or layers else RecomputeRule(module, param_indices)


def reason_without_rule(module: nn.Module) -> str:
    """Return why the parameters of a module that has no rule are not separated."""
    kind = type(module).__name__
    if isinstance(module, BATCH_NORMS):
        return f"belongs to a {kind}, which mixes the rows of a batch"
    return f"belongs to a {kind}, for which there is no rule"


def _registered(module: nn.Module) -> type[LayerRule] | None:
    """Return the rule of a module's type, unless it has another forward pass than that type."""
    served: type[Any] | None = next((one for one in type(module).__mro__ if one in LAYER_RULES.types()), None)
    if served is None or "forward" in vars(module):
        return None
    return LAYER_RULES.find(module) if type(module).forward is served.forward else None


def _covers_submodules(module: nn.Module) -> bool:
    rule = _registered(module)
    return rule is not None and rule.covers_submodules


def _knows(rule: type[LayerRule], module: nn.Module, param_indices: Mapping[str, int]) -> bool:
    """Return whether the rule knows all parameters, and none of them is computed from others."""
    if rule.parameter_names is None:
        return True
    computed = any(
        isinstance(getattr(module, name, None), Tensor) and name not in module._parameters  # pyright: ignore[reportPrivateUsage]
        for name in rule.parameter_names
    )
    return not computed and rule.parameter_names.issuperset(param_indices)


def _own_modules(module: nn.Module, *, covers: bool = False) -> list[tuple[str, nn.Module]]:
    """Return a module and the containers of its parameters, with the prefixes of their names."""
    found = [("", module)]
    for name, child in module.named_children():
        if covers or _holds_parameters(child):
            found += [(f"{name}.{prefix}", one) for prefix, one in _own_modules(child, covers=covers)]
    return found


def _holds_parameters(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS):
        return True
    children = list(module.children()) if isinstance(module, nn.ModuleDict) else []
    return bool(children) and all(_holds_parameters(one) for one in children)
