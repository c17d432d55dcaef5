"""The fidelity of a run's hypergradient: measured over the coming steps, and kept in ``fidelity.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from mixwell.data.datasets import IndexedDataset
from mixwell.data.shuffle import ShuffledCursor
from mixwell.reference.fidelity import Fidelity, measure_fidelity
from mixwell.training import builder
from mixwell.training.artifacts import check_measurements
from mixwell.training.config import Config
from mixwell.training.metrics import finite_json
from mixwell.typing import LossFn
from mixwell.utils import files
from mixwell.utils.nested import to_device
from mixwell.utils.parsing import parse_json
from mixwell.utils.regular_files import read_regular

FILE = "fidelity.json"
HELD_OUT_ROWS = 4096
"""The greatest number of validation rows on which the effect of a weight is measured."""


def measure_run_fidelity(
    config: Config,
    model: nn.Module,
    loss: LossFn,
    optimizer: Optimizer,
    domains: Mapping[str, IndexedDataset],
    validation: IndexedDataset,
    weights: Mapping[str, float],
    *,
    steps: int,
    replicates: int,
    max_rows: int,
    estimate_loss: LossFn | None = None,
) -> Fidelity:
    """Compare the estimated hypergradient with the exact one over the coming steps; nothing changes.

    Args:
        loss: ``loss(model, batch)``, the mean over the batch.
        domains: rows by domain.
        weights: at which the hypergradient is taken.
        steps: T of the comparison. It takes ``2 m + 1`` times as many training steps.
        replicates: repetitions of the estimate with other rows; each takes as many steps.
        max_rows: rows of one forward pass.
        estimate_loss: the loss in the precision of training, which the estimate is made in.
    """
    device = next(model.parameters()).device
    points = len(builder.hypergradient(config).validation_points(steps))
    wanted = min(points * builder.validation_rows(config, steps, points=points), len(validation))

    def drawn(key: str) -> tuple[list[dict[str, Any]], Any]:
        """Return, drawn by a key, the batches of every step (as many rows of each domain) and validation rows."""
        rows = max(config.batch.rows // len(domains), 1)
        cursors = {name: ShuffledCursor(len(own), f"{key}, {name}") for name, own in domains.items()}
        batches = [
            {name: to_device(own.batch(cursors[name].take(rows)), device) for name, own in domains.items()}
            for _ in range(steps)
        ]
        chosen = ShuffledCursor(len(validation), key).take(wanted)
        return batches, to_device(validation.batch(chosen), device)

    held_out = ShuffledCursor(len(validation), "effect").take(min(HELD_OUT_ROWS, len(validation)))
    held_out = np.sort(held_out)
    batches, validation_batch = drawn("fidelity")
    return measure_fidelity(
        model,
        optimizer,
        loss,
        batches,
        validation_batch,
        signal=lambda: builder.hypergradient(config),
        weights=weights,
        clip_norm=config.optimizer.clip_norm,
        estimate_loss=estimate_loss,
        replicates=[drawn(f"fidelity, replicate {number}") for number in range(replicates)],
        held_out=[
            to_device(validation.batch(held_out[begin : begin + max_rows]), device)
            for begin in range(0, len(held_out), max_rows)
        ],
    )


def read_measurements(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a run; none where none was made."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        plain = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path} ({error})") from error
    return check_measurements(plain, where=str(path))


def add_measurement(folder: Path, step: int, measured: Fidelity) -> None:
    """Add a measurement to the run's directory."""
    line: dict[str, Any] = {
        "step": step,
        "horizon": measured.horizon,
        "cosine": measured.cosine,
        "sign_agreement": measured.sign_agreement,
        "rank_agreement": measured.rank_agreement,
        "relative_error": measured.relative_error,
        "estimate": dict(zip(measured.domains, measured.estimate.tolist(), strict=True)),
        "exact": dict(zip(measured.domains, measured.exact.tolist(), strict=True)),
        "grade": measured.grade.value,
        "verdict": measured.verdict(),
    }
    if measured.replication is not None:
        found = measured.replication
        line["replication"] = {
            "replicates": len(found.estimates),
            "agreement": found.agreement,
            "worst": found.worst,
            "effect": dict(zip(measured.domains, found.effect.tolist(), strict=True)),
            "effect_cosine": found.effect_cosine,
        }
    text = json.dumps([*read_measurements(folder), finite_json(line)], indent=1, allow_nan=False)
    files.write_atomically(folder / FILE, text + "\n")
