"""Short trainings through other libraries' loops, for the record in ``tests/golden``.

Every function takes an empty folder and gives an outcome (:mod:`helpers.golden_outcomes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from helpers import integration_training, transformers_training
from helpers.golden_outcomes import of_mixer
from helpers.integration_training import (
    INTEGRATIONS,
    ROWS,
    STEPS,
    Regression,
    new_optimizer,
    own_rows,
    own_wanted,
)
from mixwell.integrations.loops import MixerLoop

Case = Callable[[Path], dict[str, Any]]


def through(folder: Path, *, case: integration_training.Case) -> dict[str, Any]:
    """A regression in float64 through an integration."""
    mixer, model, trained, wanted = INTEGRATIONS[case.integration](case, folder)
    return {
        **of_mixer(mixer, model),
        "sums of inputs": [float(one.x.sum()) for one in trained],
        "sums of validation inputs": [float(one.x.sum()) for one in wanted],
    }


def plain_loop(folder: Path) -> dict[str, Any]:
    """A loop of one's own over a PyTorch loader."""
    model = Regression()
    optimizer = new_optimizer(model)
    settings = {"horizon": 4, "budget": STEPS, "update": 5.0}
    loader = DataLoader(own_rows(), batch_size=ROWS)
    loop = MixerLoop(loader, model, optimizer, own_wanted(), integration_training.row_losses, mixer=settings)
    losses: list[float] = []
    for batch in loop:
        loss = loop.weighted_loss(integration_training.row_losses(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {**of_mixer(loop.mixer, model), "training losses": losses}


def language_model(folder: Path, **settings: Any) -> dict[str, Any]:
    """A small Llama with transformers' trainer."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    trainer = transformers_training.new_trainer(folder, **settings)
    trainer.train()
    log = trainer.state.log_history
    return {
        **of_mixer(trainer.mixer, trainer.model),
        "training losses": [float(entry["loss"]) for entry in log if "loss" in entry],
        "rows trained on": list(transformers_training.outcome(trainer)["rows"].values()),
    }


ONE = partial(integration_training.Case, way="ddp")  # in one process
THROUGH = {
    "Accelerate: projected traces": ONE(integration="accelerate", traces="projected"),
    "Accelerate: dense traces, accumulation": ONE(integration="accelerate", traces="dense", accumulation=2),
    "Accelerate: by domain": ONE(integration="accelerate", traces="dense", mixed=False),
    "Lightning: projected traces": ONE(integration="lightning", traces="projected"),
    "Lightning: dense traces, accumulation": ONE(integration="lightning", traces="dense", accumulation=2),
    "Trainer: projected traces": ONE(integration="trainer", traces="projected"),
    "Trainer: dense traces, accumulation": ONE(integration="trainer", traces="dense", accumulation=2),
    "Trainer: streams": ONE(integration="streams", traces="projected"),
}
CASES: dict[str, Case] = {
    **{name: partial(through, case=case) for name, case in THROUGH.items()},
    "plain loop over a PyTorch loader": plain_loop,
    "Trainer: language model": language_model,
    "Trainer: language model, accumulation": partial(
        language_model, args={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    ),
}
