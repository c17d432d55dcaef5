"""Which optimizers a mixer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mixwell.mixer import grad_scaler


def expect_one_optimizer(optimizer: object) -> None:
    """Raise a ValueError if this is not one optimizer that steps with the gradients that it is given."""
    if isinstance(optimizer, Sequence | Mapping) and not isinstance(optimizer, str):
        kinds = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
        named = ", ".join(type(one).__name__ for one in kinds)
        raise ValueError(
            f"a mixer trains with one optimizer, got {len(optimizer)} ({named}): give one that has all trained "
            "parameters, with parameter groups where settings differ, and freeze the others with "
            "requires_grad_(False)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss within a step, so it cannot be mixed; use SGD or AdamW")
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: Mixer(model, optimizer, "
            "domains, ...)"
        )


def no_param_groups() -> str:
    """Return the message for what takes a mixer for an optimizer, as a ``GradScaler`` does."""
    return (
        "a Mixer has no param_groups, since it is not an optimizer: give the optimizer itself to a learning rate "
        f"schedule. As to scaler.step(mixer) and scaler.unscale_(mixer): {grad_scaler.MESSAGE}"
    )
