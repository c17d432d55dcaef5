"""Whether a run fits into memory, counted from its settings before anything is allocated."""

from __future__ import annotations

import torch

from mixwell import distributed
from mixwell.training import builder
from mixwell.training.config import Config
from mixwell.training.models.base import ModelSize
from mixwell.utils.memory import available_bytes, format_bytes

MODULE_BYTES = 2_000
"""Of the Python objects of a layer and its parameters; measured: 2 to 5 KB."""
ROW_BYTES = 16
"""Of a row of a step: its place in the data and its label, as they are drawn."""


def check_memory(config: Config, size: ModelSize | None) -> None:
    """Refuse a run that takes more memory than there is.

    What is counted is what the run cannot do without; it takes more, so that one that passes may still not fit.

    Args:
        size: of the model; ``None`` where it is known only after the model is built.

    Raises:
        ValueError: with the memory that each part of the run needs, and the settings that decide it.
    """
    needed = needed_bytes(config, size)
    total, available = sum(needed.values()), _available(config)
    if available is None or total <= available:
        return
    parts = ", ".join(
        f"{name} {format_bytes(one)}"
        for name, one in sorted(needed.items(), key=lambda item: -item[1])
        if one >= total / 100
    )
    raise ValueError(
        f"the run needs at least {format_bytes(total)} of memory, and {format_bytes(available)} are available: "
        f"{parts}. Lower those settings"
    )


def needed_bytes(config: Config, size: ModelSize | None) -> dict[str, int]:
    """Return the least bytes of each part of a run on this rank, by a name with the settings that decide it."""
    world, domains = distributed.world_size(), len(config.domains)
    needed = {"rows (batch.rows)": ROW_BYTES * config.batch.rows}
    learned = config.mixer.method == "mixwell"
    sharded = world if config.parallel.strategy == "fsdp" else 1
    parameters = 0 if size is None else size.parameters
    if size is not None:
        copies = 4 if config.optimizer.preconditioned else 2  # parameters, gradients, and Adam's moments
        needed["model and optimizer (model)"] = (
            4 * parameters * copies // sharded + 4 * size.buffers + MODULE_BYTES * size.modules
        )
        rows = -(-config.batch.rows // world)
        if not (learned and config.traces.takes_mixed_batches):
            rows = -(-rows // domains)  # each domain may have a pass of its own
        rows = min(rows, config.batch.micro_rows or rows)
        width = 2 if config.precision == "bfloat16" else 4
        needed["activations (model, batch.rows; batch.micro_rows divides them)"] = (
            width * rows * size.activations
        )
    if learned:
        held = config.traces.least_bytes(parameters, domains)
        shared = sharded if config.traces.with_sharded_parameters == "sharded" else 1
        needed[f"traces of {domains} domains (mixer.traces: {config.trace_kind})"] = held // shared
    return needed


def _available(config: Config) -> int | None:
    device = builder.choose_device(config.device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
