"""Short trainings in two processes, for the record in ``tests/golden``.

All cases are trained by the same two processes, which take longer to start than to train.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from helpers import integration_training
from helpers.distributed_training import Case, in_processes, new_mixer, new_model, train, train_runs, wrapped
from helpers.golden_outcomes import of_files, of_mixer
from helpers.golden_runs import text_config
from mixwell import distributed

LOOPS = {
    "ddp, by domain, dense traces": Case("ddp", "sgd", "dense", mixed=False, rounds=2),
    "ddp, mixed, projected traces": Case("ddp", "adamw", "projected", mixed=True, rounds=2),
    "ddp, mixed, dense traces, uneven rows": Case("ddp", "sgd", "dense", mixed=True, uneven=True, rounds=2),
    "fsdp, by domain, dense traces": Case("fsdp", "sgd", "dense", mixed=False, rounds=2),
    "fsdp, mixed, projected traces": Case("fsdp", "adamw", "projected", mixed=True, rounds=2),
}
RUNS: dict[str, dict[str, Any]] = {
    "ddp, default": {},
    "ddp, equal counts, micro-batches": {
        "batch": {"rows": 12, "counts": "equal", "micro_rows": 2},
        "mixer": {"traces": "dense"},
    },
    "ddp, group-dro": {"mixer": {"method": "group-dro"}},
    "fsdp, default": {"parallel": {"strategy": "fsdp"}},
}
THROUGH = {
    "Accelerate": integration_training.Case("accelerate", "ddp", "projected"),
    "Lightning": integration_training.Case("lightning", "ddp", "projected"),
    "Trainer": integration_training.Case("trainer", "ddp", "projected"),
}
NAMES = [
    *(f"two processes, loop: {name}" for name in LOOPS),
    *(f"two processes, run: {name}" for name in RUNS),
    *(f"two processes, {name}" for name in THROUGH),
]


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    """The outcomes of all cases, by name."""
    plans: list[tuple[dict[str, Any], str, int | None]] = []
    for place, changes in enumerate(RUNS.values()):
        config = text_config(folder, {"batch": {"rows": 12}, "steps": 14, **changes})
        plain = yaml.safe_load(config.read_text()) | {"base": str(folder)}
        plans.append((plain, str(folder / f"run-{place}"), None))
    in_processes(work, plans, str(folder))
    found: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    for name, (_, out, _) in zip(RUNS, plans, strict=True):
        found[f"two processes, run: {name}"] |= of_files(Path(out))
    return found


def work(plans: list[tuple[dict[str, Any], str, int | None]], folder: str) -> None:
    """What each process does. All of them look at a model, of which each may have a part."""
    found: dict[str, Any] = {}
    for name, case in LOOPS.items():
        model = wrapped(new_model(case), case.way)
        mixer = new_mixer(case, model)
        train(case, model, mixer)
        found[f"two processes, loop: {name}"] = of_mixer(mixer, model)
    for name, done in zip(RUNS, train_runs(plans), strict=True):
        found[f"two processes, run: {name}"] = of_mixer(done.mixer, done.model)
    integration_training.prepare_process()
    for name, case in THROUGH.items():
        mixer, model, *_ = integration_training.INTEGRATIONS[case.integration](case, Path(folder))
        found[f"two processes, {name}"] = of_mixer(mixer, model)
    if distributed.rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
