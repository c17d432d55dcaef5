"""How many steps a method may train for, when everything that it computes is charged."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mixwell import methods
from mixwell.training import config_io, mixing
from mixwell.training.config import Config
from mixwell.training.trainer import validation_rows


def cost(config: Config, sizes: Mapping[str, int], held_out: int) -> float:
    """What a run will compute, in training steps: a gradient of a batch each.

    Training, validation gradients, trials before the run, probes and passes of a reference model; a forward pass
    alone is a third. Evaluations are for us to look at and do not count.

    Args:
        config: the settings.
        sizes: rows by domain.
        held_out: rows of the validation set.

    Returns:
        The sum; of a method whose solver may stop early, the most that it can be.
    """
    method = methods.find(config.mixer.method)
    context = mixing.method_context(config, sizes, held_out)
    extra = method.extra(context)
    horizon = mixing.horizon(config)
    learned = method.learns(context.options)
    points = len(method.recipe(context).signal.validation_points(horizon)) if learned else 0
    rows = points * min(validation_rows(config, horizon, points=points), held_out)
    rounds = math.ceil((config.steps - config.mixer.warmup) / horizon)
    return (
        extra.before
        + config.steps * (1 + extra.per_step)
        + rounds * (extra.per_round + rows / config.batch.rows)
    )


def affordable(config: Config, sizes: Mapping[str, int], held_out: int, *, budget: float) -> Config:
    """The same settings with as many training steps as the budget allows.

    Args:
        config: the settings.
        sizes: rows by domain.
        held_out: rows of the validation set.
        budget: in training steps.

    Returns:
        The settings of the longest run that costs no more.

    Raises:
        ValueError: not even one step can be paid for.
    """
    if cost(_with(config, 1), sizes, held_out) > budget:
        raise ValueError(
            f"{config.mixer.method} cannot train a single step within {budget:g}, as what it computes besides "
            "costs more; raise `steps`, or lower its options"
        )
    low, high = 1, max(1, int(budget))
    while low < high:
        middle = (low + high + 1) // 2
        if cost(_with(config, middle), sizes, held_out) <= budget:
            low = middle
        else:
            high = middle - 1
    return _with(config, low)


def _with(config: Config, steps: int) -> Config:
    plain = config.model_dump(mode="json")
    plain["steps"] = steps
    if isinstance(plain["mixer"]["horizon"], int):
        plain["mixer"]["horizon"] = min(plain["mixer"]["horizon"], steps)
    plain["mixer"]["warmup"] = min(plain["mixer"]["warmup"], steps - 1)
    return config_io.check(plain, where=config.mixer.method)
