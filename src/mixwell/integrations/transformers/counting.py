"""Rows without a label: they are in a batch, but do not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mixwell import distributed
from mixwell.mixer.batch import MixtureBatch


def count_rows(
    batches: Sequence[MixtureBatch], counted: Sequence[Tensor | None], device: torch.device
) -> list[MixtureBatch]:
    """Return the micro-batches of a step with the counts of the rows that have a label; all ranks must call it.

    With ``c_d`` rows that count of the ``n_d`` rows of a domain in the step, the loss of the domain is the mean
    over those ``c_d``. A domain with ``c_d = 0`` has no part in the step.

    Args:
        batches: the micro-batches of the step on this rank.
        counted: for each whether its rows count, shape ``(rows,)``; ``None`` for all.
        device: on which ranks exchange their counts.
    """
    names, step = batches[0].names, batches[0].step
    masks = [
        torch.ones(len(batch), dtype=torch.bool) if mask is None else mask.cpu()
        for batch, mask in zip(batches, counted, strict=True)
    ]
    local = sum(
        np.bincount(batch.labels[mask].numpy(), minlength=len(names))
        for batch, mask in zip(batches, masks, strict=True)
    )
    # Exact in float32, which every device has, up to 16 million rows.
    total = distributed.all_reduce_sum(np.asarray(local, dtype=np.float32), device)
    found = {name: int(count) for name, count in zip(names, total, strict=True) if count}
    if found == {name: count for name, count in step.total.items() if count}:
        return list(batches)
    here = dict(zip(names, np.asarray(local).tolist(), strict=True))
    step = replace(step, total=found, local={name: here[name] for name in found})
    return [replace(batch, counted=mask, step=step) for batch, mask in zip(batches, masks, strict=True)]
