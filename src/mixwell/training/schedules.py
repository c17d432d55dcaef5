"""How the learning rate rises and falls: a function of the step alone, so that a resumed run needs no state."""

from __future__ import annotations

import math

from mixwell.training.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, *, step: int, steps: int) -> float:
    """The learning rate of a step.

    It rises linearly over ``warmup`` steps, then falls from ``lr`` to ``final * lr`` along a half cosine or a
    line, or stays.

    Args:
        optimizer: its settings.
        step: steps done before this one.
        steps: of the whole run.

    Returns:
        eta.

    Example:
        >>> settings = OptimizerConfig(lr=1.0, schedule="linear", warmup=2, final=0.0)
        >>> [learning_rate(settings, step=step, steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(steps // 20, 1000) if optimizer.warmup == "auto" else optimizer.warmup
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = (step - warmup) / max(steps - warmup, 1)
    left = 1 - done if optimizer.schedule == "linear" else (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return optimizer.lr * (optimizer.final + (1 - optimizer.final) * max(left, 0.0))
