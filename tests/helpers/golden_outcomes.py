"""What a training came to, as plain values under names that do not follow the library's.

The values are recorded in ``tests/golden/scaffold.json``. An outcome is a tree of mappings and lists of numbers
and text. Its keys are fixed here and in the cases, so that a renamed class, attribute or field of a file changes
the code that reads a value, and not the record of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.text_configs import lines
from mixwell import Mixer, distributed
from mixwell.training import mixture_file
from mixwell.training.trainer import Trainer

DIGEST = "digest"
"""The key of a value that is the same only where all bits are."""
SCORES = "scores of each round"
# Scores are differences of losses or sums of products that nearly cancel, which rounding changes more.
_SCORES_ROUNDING = 100
# Entries of the vector on which parameters are projected; prime, so that it does not repeat with their shapes.
_PERIOD = 1009


def parameters_summary(parameters: Iterable[Tensor]) -> dict[str, Any]:
    """Norms of the parameters, projections on a fixed vector, which depend on the order too, and a digest."""
    digest = hashlib.sha256()
    precisions: set[str] = set()
    norms: list[float] = []
    projected: list[float] = []
    for parameter in parameters:
        value = distributed.full_tensor(parameter.detach()).contiguous()
        precisions.add(str(value.dtype).removeprefix("torch."))
        digest.update(value.numpy().tobytes())
        flat = value.double().flatten()
        fixed = torch.cos(torch.arange(len(flat), dtype=torch.float64) % _PERIOD)
        norms.append(float(flat.norm()))
        projected.append(float(flat @ fixed))
    return {
        "precision": ", ".join(sorted(precisions)),
        "norms": norms,
        "projections": projected,
        DIGEST: digest.hexdigest()[:16],
    }


def of_mixer(mixer: Mixer, model: nn.Module) -> dict[str, Any]:
    """What a mixer and its model came to."""
    weights = mixer.weights
    return {
        "domains": list(weights.names),
        "weights after each round": weights.history.tolist(),
        "average weights": list(weights.average.values()),
        "steps of each round": [record.steps for record in mixer.rounds],
        SCORES: [list(record.scores.values()) for record in mixer.rounds],
        "losses of each round": [list(record.losses.values()) for record in mixer.rounds],
        "parameters": parameters_summary(model.parameters()),
    }


def of_run(done: Trainer, folder: Path) -> dict[str, Any]:
    """What a run came to, and what it wrote."""
    return {**of_mixer(done.mixer, done.model), **of_files(folder)}


def of_files(folder: Path) -> dict[str, Any]:
    """What a run wrote about its losses and its mixture."""
    written = lines(folder)
    found = mixture_file.read_mixture(folder)
    return {
        "training losses": [line["loss"] for line in written if line["kind"] == "step"],
        "evaluations": [list(line["losses"].values()) for line in written if line["kind"] == "evaluation"],
        "rows trained on": list(found["rows"]["trained_on"].values()),
        "rows computed": found["rows"]["computed"],
        "written weights": list(found["weights"]["last"].values()),
        "written average": list(found["weights"]["average"].values()),
    }


def differences(
    found: Any, recorded: Any, *, tolerance: float, exact: bool = False, where: str = ""
) -> Iterator[str]:
    """Where an outcome is not what was recorded.

    A list of numbers is compared as a vector: entries may differ by ``tolerance`` times the largest of them, so
    that an entry that is zero but for rounding may be so.

    Args:
        found: an outcome.
        recorded: what it was.
        tolerance: relative; a hundred times that for scores.
        exact: whether every bit must agree, those of the digests too.
        where: the place in the outcome, for the messages.

    Yields:
        A line for each place.
    """
    if isinstance(recorded, Mapping):
        if not isinstance(found, Mapping) or found.keys() != recorded.keys():
            yield f"{where}: {found!r:.200} has other entries than {recorded!r:.200}"
            return
        for key, value in recorded.items():
            if exact or key != DIGEST:
                place = f"{where}, {key}" if where else str(key)
                allowed = tolerance * (_SCORES_ROUNDING if key == SCORES else 1)
                yield from differences(found[key], value, tolerance=allowed, exact=exact, where=place)
    elif _is_vector(recorded) and _is_vector(found) and len(found) == len(recorded):
        one, other = np.array(found, dtype=float), np.array(recorded, dtype=float)
        allowed = 0.0 if exact else tolerance * float(np.abs(other).max(initial=0.0))
        if not np.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True):
            yield f"{where}: {found} was {recorded}, off by {np.abs(one - other).max():.1e}, allowed {allowed:.1e}"
    elif isinstance(recorded, Sequence) and not isinstance(recorded, str):
        if not isinstance(found, Sequence) or len(found) != len(recorded):
            yield f"{where}: {found!r:.200} is not as long as {recorded!r:.200}"
            return
        for place, (one, other) in enumerate(zip(found, recorded, strict=True)):
            yield from differences(one, other, tolerance=tolerance, exact=exact, where=f"{where}[{place}]")
    elif isinstance(recorded, float) and isinstance(found, float):
        close = math.isclose(found, recorded, rel_tol=0.0 if exact else tolerance)
        if not (close or (math.isnan(found) and math.isnan(recorded))):
            yield f"{where}: {found!r} was {recorded!r}"
    elif found != recorded:
        yield f"{where}: {found!r} was {recorded!r}"


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, float) for one in value)
