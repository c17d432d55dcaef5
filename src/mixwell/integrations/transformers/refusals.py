"""Settings that cannot be mixed are refused before training, with a message about what to do instead."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from mixwell.data import readers
from mixwell.utils.user_warnings import warn_user


def refuse_settings(trainer: Trainer, *, knows_rows: bool) -> None:
    """Refuse settings that hide gradients, layers or the losses of rows from the mixer.

    Args:
        knows_rows: whether the user has given the losses of rows.
    """
    args = trainer.args
    if args.n_gpu > 1:
        raise ValueError("DataParallel cannot be mixed; start one process per GPU with `accelerate launch`")
    if args.fp16:
        raise ValueError("fp16 scales the loss, which cannot be mixed; use bf16=True")
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed keeps the gradients to itself and cannot be mixed; use DDP or FSDP2")
    _refuse_data_settings(args)
    overridden = type(trainer).compute_loss is not Trainer.compute_loss
    if (trainer.compute_loss_func is not None or overridden) and not knows_rows:
        name = "compute_loss" if overridden else "compute_loss_func"
        raise ValueError(
            f"{name} gives one number for a batch, and mixing needs one for each row; give row_losses=f, "
            "where f(model, inputs) returns the loss of every row"
        )


def _refuse_data_settings(args: Any) -> None:
    """Refuse settings of a ``DataLoader`` that batches by the weights cannot follow."""
    if args.train_sampling_strategy != "random":
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} chooses the rows of a batch, which "
            "MixerTrainer draws at random by the weights of their domains; leave it out"
        )
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            raise ValueError(
                f"accelerator_config: {name}=True changes how processes share a batch, which MixerTrainer does "
                "itself; leave it out"
            )
    sizes = {name: getattr(args.parallelism_config, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp")}
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"parallelism_config: {name}_size={size} lets processes share rows, which cannot be mixed; use "
                "DDP or FSDP2"
            )
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        raise ValueError(
            f"optim={args.optim.value!r} updates parameters during the backward pass, so that there are no "
            "gradients to mix; use another, such as adamw_torch"
        )
    if not args.dataloader_in_order:
        warn_user(
            "dataloader_in_order=False has no effect: MixerTrainer reads rows in order, to resume exactly"
        )


def refuse_validation(dataset: Any, rows: int | None) -> None:
    """Refuse a validation set that is missing or empty, and a number of rows below 1."""
    if dataset is None:
        raise ValueError(
            "validation_dataset is missing: it says what the weights should be good for. Give rows like those "
            "of the training data, other than those that you evaluate on"
        )
    if not readers.is_stream(dataset) and not len(dataset):
        raise ValueError("validation_dataset is empty; give it at least one row")
    if rows is not None and rows < 1:
        raise ValueError(f"validation_rows must be at least 1, got {rows}")
