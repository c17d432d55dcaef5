"""The number of steps that a method can afford when everything it computes is charged."""

from __future__ import annotations

from collections.abc import Mapping

from mixwell import methods
from mixwell.simplex.rounds import round_count
from mixwell.training import builder, config_io
from mixwell.training.config import Config


def cost(config: Config, sizes: Mapping[str, int], held_out: int) -> float:
    """Return the cost of a run in training steps (the gradient of one batch).

    It includes training, validation gradients, trials before the run, probes and passes of a reference model; a
    forward pass costs a third. Evaluations are not charged. For a solver that may stop early it is the maximum.

    Args:
        sizes: rows by domain.
        held_out: rows of the validation set.
    """
    method = methods.find(config.mixer.method)
    context = builder.method_context(config, sizes, held_out)
    extra = method.extra(context)
    horizon = builder.horizon(config)
    learned = method.learns(context.options)
    points = len(method.recipe(context).signal.validation_points(horizon)) if learned else 0
    rows = points * min(builder.validation_rows(config, horizon, points=points), held_out)
    rounds = round_count(config.steps - config.mixer.warmup, horizon)
    return (
        extra.before
        + config.steps * (1 + extra.per_step)
        + rounds * (extra.per_round + rows / config.batch.rows)
    )


def affordable(config: Config, sizes: Mapping[str, int], held_out: int, *, budget: float) -> Config:
    """Return the settings of the longest run that costs at most ``budget`` (arguments as of :func:`cost`).

    Raises:
        ValueError: The budget does not pay for a single step.
    """
    if cost(_with_steps(config, 1), sizes, held_out) > budget:
        raise ValueError(
            f"{config.mixer.method} cannot train a single step within {budget:g}: its other computation "
            "costs more; raise `steps`, or lower its options"
        )
    low, high = 1, max(1, int(budget))
    while low < high:
        middle = (low + high + 1) // 2
        if cost(_with_steps(config, middle), sizes, held_out) <= budget:
            low = middle
        else:
            high = middle - 1
    return _with_steps(config, low)


def _with_steps(config: Config, steps: int) -> Config:
    plain = config.model_dump(mode="json")
    plain["steps"] = steps
    if isinstance(plain["mixer"]["horizon"], int):
        plain["mixer"]["horizon"] = min(plain["mixer"]["horizon"], steps)
    plain["mixer"]["warmup"] = min(plain["mixer"]["warmup"], steps - 1)
    return config_io.validate_config(plain, where=config.mixer.method)
