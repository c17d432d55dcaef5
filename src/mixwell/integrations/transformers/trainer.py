"""A ``Trainer`` that learns the mixture of its training data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from mixwell import distributed
from mixwell.data import readers
from mixwell.data.loader import MixtureLoader
from mixwell.integrations import loggers
from mixwell.integrations.batches import FollowedBatches, default_settings
from mixwell.integrations.transformers import checkpoints, counting, refusals
from mixwell.integrations.transformers import row_losses as losses_of
from mixwell.integrations.transformers.callbacks import (
    FoldedPrinterCallback,
    FoldedProgressCallback,
    MixingCallback,
)
from mixwell.integrations.transformers.domains import CollateWithout, by_domain
from mixwell.integrations.transformers.validation import ValidationRows, as_one_dataset
from mixwell.mixer.batch import MixtureBatch
from mixwell.mixer.mixer import Mixer
from mixwell.simplex.repetition import EpochPace, epoch_caps
from mixwell.training import mixture_file
from mixwell.utils.nested import identity

RESERVED = {"budget", "clip_norm"}
"""The settings of the mixer that the trainer chooses."""
RowLosses = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""From the model and a batch one loss for each row, shape ``(rows,)``."""


class MixerTrainer(Trainer):
    """transformers' ``Trainer``, which learns the weights of its domains while it trains.

    Three lines of a script change: the import, the name, and the validation set::

        from mixwell.integrations.transformers import MixerTrainer

        trainer = MixerTrainer(
            model=model,
            args=args,
            train_dataset=dataset,             # with a column "domain"; or {"web": web, "code": code};
                                               # or a MixtureLoader, with its collate if it has one
            validation_dataset=wanted,         # what the model should be good at
        )
        trainer.train()
        trainer.mixer.weights.average

    Batches are ordinary mixed ones: how many rows of each domain a step has follows the weights, and the loss of a
    row counts by the weight of its domain. Every T steps the gradient of the validation loss updates the weights.
    Logs have the loss, the weight and the rows of every domain; checkpoints carry the mixer and the place in the
    data, so that ``train(resume_from_checkpoint=...)`` resumes exactly. Gradient accumulation and several
    processes (``accelerate launch``, ``torchrun``) work. ``mixture.json`` is written to the output directory.

    A row's loss is the mean over its tokens that count, and a domain's the mean over its rows.

    Args:
        args: as for ``Trainer``; all of its arguments can be given.
        validation_dataset: map-style or a stream, of the same form as the training data. Its gradients move the
            weights, so evaluate on other data.
        domain_column: the column of ``train_dataset`` that names the domain of each row.
        mixer: settings of :class:`mixwell.Mixer` by keyword, such as ``horizon``, ``constraints``, ``weights``,
            ``update``, ``warmup``, ``signal`` (by default a hypergradient with projected traces). Without
            ``signal`` and ``constraints``, and where rows have numbers, :class:`mixwell.EpochPace` limits
            repetition.
        validation_rows: rows of each validation gradient; by default those of a round take 5% of the rows of its
            traced steps in all (:meth:`mixwell.Mixer.validation_rows`).
        row_losses: the loss of each row, from the model and a batch, for models with a loss that is not known.
        least: rows that each domain has in every step; by default a quarter of an equal share.
        block: rows of a stream that are shuffled together.
        kwargs: as for ``Trainer``.
    """

    mixer: Mixer
    """Learns the weights; made at the beginning of ``train()``."""

    def __init__(
        self,
        *args: Any,
        validation_dataset: Any = None,
        domain_column: str = "domain",
        mixer: Mapping[str, Any] | None = None,
        validation_rows: int | None = None,
        row_losses: RowLosses | None = None,
        least: int | None = None,
        block: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        refusals.refuse_settings(self, knows_rows=row_losses is not None)
        given: Any = self.train_dataset
        self._given_loader = given if isinstance(given, MixtureLoader) else None
        self._domains = (
            by_domain(given, domain_column) if self._given_loader is None else self._given_loader.datasets
        )
        self._column = domain_column
        self._settings = dict(mixer or {})
        default_settings(self._settings, reserved=RESERVED)  # refuses before training begins
        # The signal of another method comes with that method's own settings, and given constraints are complete.
        self._paced = not {"signal", "constraints"} & set(self._settings)
        wanted = as_one_dataset(validation_dataset)
        refusals.refuse_validation(wanted, validation_rows)
        self._validation_dataset, self._validation_rows = wanted, validation_rows
        self._row_losses, self._least, self._block = row_losses, least, block
        self._followed: FollowedBatches | None = None
        self._batches: deque[MixtureBatch] = deque()  # of the step, not trained on yet
        self._resumed: str | None = None
        self._clipped: tuple[Tensor, float] | None = None
        self._checked = False
        self._sums = np.zeros((2, len(self._domains)))  # of losses and rows since the last log
        self._unread: Tensor | None = None
        self.add_callback(MixingCallback(self))
        self._fold_displayed_logs()

    # ------------------------------------------------------------------------------------------- what Trainer asks

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or resume exactly from a checkpoint: its folder, or ``True`` for the last one."""
        if resume_from_checkpoint is True:
            folder = str(self.args.output_dir)
            resume_from_checkpoint = get_last_checkpoint(folder)
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no checkpoint in {folder}")
        self._resumed = resume_from_checkpoint or None
        try:
            return super().train(self._resumed, *args, **kwargs)
        finally:
            # The trainer keeps its DataLoader, so that the workers would wait until the process ends.
            if self._followed is not None:
                self._followed.loader.shutdown_workers()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and wrap ``clip_grad_norm_`` to record the norm."""
        super().create_accelerator_and_postprocess()
        clip = self.accelerator.clip_grad_norm_

        def watched(parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
            norm = clip(parameters, max_norm, norm_type=norm_type)
            if norm is not None:
                self._clipped = distributed.full_tensor(norm), float(max_norm)
            return norm

        self.accelerator.clip_grad_norm_ = watched

    def get_train_dataloader(self) -> Any:
        """Return batches that follow the mixer.

        They are not given to Accelerate, which would fetch one batch ahead and so miss a change of the weights.
        """
        args, process = self.args, (self.args.process_index, self.args.world_size)
        seed = args.seed if args.data_seed is None else args.data_seed
        caps = epoch_caps(self._settings.get("constraints", ()))
        rows = self._step_rows = self._train_batch_size * args.gradient_accumulation_steps * process[1]
        settings: dict[str, Any] = {
            "micro_batches": args.gradient_accumulation_steps,
            "collate": self._collator("training"),
            "rank": process[0],
            "world_size": process[1],
        }
        given = self._given_loader
        if given is None:
            self._loader = MixtureLoader(
                self._domains,
                rows,
                least=self._least,
                cap=caps[0] if caps else None,
                block=self._block,
                seed=seed,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                multiprocessing_context=args.dataloader_multiprocessing_context,
                **settings,
            )
        else:
            if any(one is not given.cap for one in caps):
                raise ValueError(
                    "the mixer has an EpochCap that the MixtureLoader does not know, so that it would not count "
                    "the rows; give the same object to MixtureLoader(..., cap=...)"
                )
            if given.batch_size != rows:
                raise ValueError(
                    f"the loader makes steps of {given.batch_size} rows, and TrainingArguments of {rows} (batch "
                    "size x accumulation x processes); give both the same"
                )
            self._loader = given.with_settings(rows, **settings)
        self._followed = FollowedBatches(self._loader)
        self._validation = ValidationRows(
            self._validation_dataset, self._validation_rows, step_rows=rows, seed=seed, process=process
        )
        pin = args.dataloader_pin_memory and torch.cuda.is_available()
        return DataLoader(self._followed, batch_size=None, collate_fn=identity, pin_memory=pin)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of rows of a pass over all data."""
        if self._followed is not None and getattr(dataloader, "dataset", None) is self._followed:
            return self._loader.total_rows or super().num_examples(dataloader)
        return super().num_examples(dataloader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of a step, and count their rows that have a label, over all ranks."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        assert self._followed is not None
        batches = [self._followed.next() for _ in samples]
        counted = [self._counted_rows(inputs) for inputs in samples]
        self._batches = deque(counting.count_rows(batches, counted, device) if batches else ())
        return samples, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a micro-batch, its rows weighted by their domains.

        The loss is not divided by the number of micro-batches, since it is already a part of the step's.
        """
        prepared: dict[str, Any] = self._prepare_inputs(inputs)
        self._check_losses(model, prepared)
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # as schedule-free optimizers want it
            optimizer.train()
        batch = self._batches.popleft()
        with self.mixer.batch(batch) as scope:
            with self.compute_loss_context_manager():
                losses, auxiliary = self._losses(model, prepared)
            loss = scope.weighted_loss(losses)
            if auxiliary is not None:
                loss = loss + batch.fraction * auxiliary
            self.accelerator.backward(loss)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        # Left on the device, and read when they are logged.
        self._unread = scope.sums if self._unread is None else self._unread + scope.sums
        self._sums[1] += scope.rows
        return loss.detach()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss, weight and rows of each domain in addition."""
        if "loss" in logs:
            self._read_losses()
            own = torch.from_numpy(self._sums.astype(np.float32)).to(self.args.device)
            total, rows = distributed.all_reduce_mean(own).cpu().double().numpy()
            self._sums[:] = 0
            found = {name: total[k] / rows[k] for k, name in enumerate(self._domains) if rows[k]}
            logs = {
                **logs,
                **loggers.named_step(losses=found, rows=self._loader.taken),
                **loggers.named_weights(self.mixer.weights.last),
            }
        super().log(logs, *args, **kwargs)

    # ------------------------------------------------------------------------------------------- what hooks call

    def begin_mixing(self) -> None:
        """Make the mixer, now that the optimizer is there, and load a checkpoint if there is one."""
        model: Any = self.model_wrapped  # which determines how gradients are averaged over ranks
        optimizer: Any = self.optimizer
        # With a signal of its own, since training may begin again (auto_find_batch_size).
        steps, settings = self.state.max_steps, default_settings(self._settings, reserved=RESERVED)
        if self._paced and not any(readers.is_stream(rows) for rows in self._domains.values()):
            sizes = {name: len(rows) for name, rows in self._domains.items()}
            settings["constraints"] = [EpochPace(sizes, batch_size=self._step_rows, budget=steps)]
        self.mixer = Mixer(model, optimizer, tuple(self._domains), budget=steps, **settings)
        assert self._followed is not None
        self._followed.mixer = self.mixer
        self._checked = self._resumed is not None
        if self._resumed is not None:
            self._load(Path(self._resumed))

    def before_step(self) -> None:
        """Fold the step into the traces; its gradients are there, and clipped."""
        norm, limit = self._clipped or (None, None)
        self._clipped = None
        self.mixer.before_step(norm=norm, clip_norm=limit)

    def validate(self) -> None:
        """Compute the validation gradient that is due."""
        # Rows for evaluation may be more than there is room for a backward pass.
        size = min(self.args.eval_batch_size, self._train_batch_size)
        parts, rank_scale = self._validation.next(
            self.mixer,
            self._collator("evaluation"),
            self._counted_rows,
            max_rows=size,
            device=self.args.device,
        )
        rows, own = sum(len(mask) for _, mask in parts), sum(int(mask.sum()) for _, mask in parts)
        model: Any = self.model_wrapped
        # Models of transformers keep all activations outside of training, whatever checkpointing was asked for.
        model.train(self.args.gradient_checkpointing)
        for inputs, mask in parts:
            fraction = len(mask) / rows
            with self.mixer.validation(fraction=fraction, rank_scale=rank_scale) as scope:
                with self.compute_loss_context_manager():
                    losses, _ = self._losses(model, self._prepare_inputs(dict(inputs)))
                # Fractions are of rows, and the mean is over those that count.
                total = losses.masked_fill(~mask.to(losses.device), 0).sum()
                self.accelerator.backward(scope.scaled_loss(total / (max(own, 1) * fraction)))
        model.train()

    def save_mixing(self, folder: Path) -> None:
        """Put the mixer and the place in the data into a checkpoint."""
        self._read_losses()
        plain = {
            "loader": self._loader.state_dict(),
            "validation": self._validation.reader.state(),
            "losses": self._sums.tolist(),
            "streams": self._validation.streamed or self._loader.streams,
        }
        checkpoints.write_checkpoint(folder, self.mixer, plain)
        self.save_mixture(folder)

    def save_mixture(self, folder: Path) -> None:
        """Write ``mixture.json``, once for all processes."""
        if self.is_world_process_zero():
            rows = {name: len(one) for name, one in self._domains.items() if not readers.is_stream(one)}
            described = mixture_file.describe_mixture(
                self.mixer, method="mixwell", seed=self.args.seed, rows=rows, taken=self._loader.taken
            )
            mixture_file.write_mixture(folder, described)

    # ------------------------------------------------------------------------------------------- inside

    def _read_losses(self) -> None:
        if self._unread is not None:
            self._sums[0] += self._unread.cpu().numpy()
            self._unread = None

    def _collator(self, what: str) -> Callable[[list[Any]], Mapping[str, Any]]:
        if self._given_loader is not None and self._given_loader.collate is not None:
            return self._given_loader.collate
        collate = self._get_collator_with_removed_columns(self.data_collator, description=what)
        return CollateWithout(collate, self._column)

    def _losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the loss of every row, and what the model adds for the whole batch."""
        if self._row_losses is not None:
            return self._row_losses(model, inputs), None
        smoothing = self.args.label_smoothing_factor
        parts = losses_of.parts_of(model, self._loss_type, inputs, smoothing=smoothing)
        return parts.means(), parts.auxiliary

    @property
    def _loss_type(self) -> str | None:
        return losses_of.loss_type(self.accelerator.unwrap_model(self.model))

    def _counted_rows(self, inputs: Any) -> Tensor | None:
        return losses_of.counted_rows(self.accelerator.unwrap_model(self.model), self._loss_type, inputs)

    def _fold_displayed_logs(self) -> None:
        """Display one entry for each kind of number, not one for each domain."""
        folded = {PrinterCallback: FoldedPrinterCallback, ProgressCallback: FoldedProgressCallback}
        for plain, folding in folded.items():
            if any(type(one) is plain for one in self.callback_handler.callbacks):
                self.remove_callback(plain)
                self.add_callback(folding)

    def _check_losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Check once in a run that the loss by rows is the model's own."""
        if self._checked or self._row_losses is not None:
            return
        self._checked = True
        model.eval()
        with self.compute_loss_context_manager():
            losses_of.check_model_loss(model, self._loss_type, inputs)

    def _load(self, folder: Path) -> None:
        plain = checkpoints.read_places(folder)
        micro_batches = self.args.gradient_accumulation_steps
        per_epoch = len(self._loader) // micro_batches if self._loader.total_rows else self.state.max_steps
        # First, since its message about another batch size is the clearer one.
        self._loader.load_state_dict(plain["loader"])
        if not self.args.ignore_data_skip:
            assert self._followed is not None
            self._followed.skipped = self.state.global_step % per_epoch * micro_batches
        checkpoints.load_mixer(folder, self.mixer)
        self._validation.reader.load_state(plain["validation"])
        self._sums[:] = plain["losses"]
