"""Mixing in Lightning: a callback, and one line in ``training_step``."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from mixwell import distributed
from mixwell.data.loader import MixtureLoader
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.integrations import loggers
from mixwell.integrations.batches import (
    FollowedBatches,
    Labels,
    MixtureData,
    OpenBatch,
    ValidationBatches,
    settings_for,
)
from mixwell.mixer.mixer import Mixer

__all__ = ["MixerCallback", "MixtureLoader"]
Loss = Callable[[LightningModule, Any], Tensor]


class MixerCallback(Callback):
    """Learns the weights of the domains while a Lightning ``Trainer`` trains.

    The module gives the loss of each row::

        loader = MixtureLoader({"web": web, "code": code}, batch_size=64)
        mixing = MixerCallback(loader, DataLoader(wanted, batch_size=256))

        class Module(LightningModule):
            def training_step(self, batch, index):
                losses = cross_entropy(self(batch["x"]), batch["y"], reduction="none")
                return mixing.weighted_loss(losses)                 # in place of losses.mean()

        Trainer(callbacks=[mixing], ...).fit(module, mixing.batches)
        mixing.mixer.weights.average

    Its state is in Lightning's checkpoints, so that a resumed run equals an uninterrupted one.

    The data may also be a :class:`mixwell.data.mixture_dataset.MixtureDataset`; then give ``fit`` a ``DataLoader``
    of it. Its workers begin anew in a resumed run, with a warning.

    Args:
        data: the training data.
        validation: batches, such as a ``DataLoader``; one is taken for every validation gradient (eight in a
            round, by default), from the beginning again at the end. ``mixer.validation_rows`` gives a size.
        labels: from a batch of a ``DataLoader`` the domain of each row; by default its column ``domain``, or the
            last part of a tuple.
        loss: from the module and a validation batch the mean loss; by default ``training_step`` gives it.
        mixer: settings of :class:`mixwell.Mixer` by keyword, such as ``horizon`` or ``constraints``.
    """

    mixer: Mixer
    """Learns the weights; made at the beginning of ``fit``."""

    def __init__(
        self,
        data: MixtureData,
        validation: Iterable[Any],
        *,
        labels: Labels | None = None,
        loss: Loss | None = None,
        mixer: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings_for(data, mixer, reserved={"budget", "clip_norm"})
        self.data, self._loss = data, loss
        self._validation = ValidationBatches(validation)
        self._batch = OpenBatch(data, labels)
        self._followed = FollowedBatches(data) if isinstance(data, MixtureLoader) else None
        self._stepping = False
        # Lightning fetches one batch ahead: the place in the data after the batch in training, and after the next.
        self._places: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._saved: dict[str, Any] | None = None

    def weighted_loss(self, losses: Tensor) -> Tensor:
        """Return the loss for ``training_step``: in training weighted by the rows' domains, else the mean.

        Args:
            losses: one for each row, or with more dimensions after the first, of which the mean is taken.
        """
        return self._batch.weighted_loss(losses)

    # --------------------------------------------------------------------------------- what Lightning calls

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the mixer, or load that of a checkpoint."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ValueError(
                "MixerCallback mixes modules with one optimizer and automatic optimization; put mixwell.Mixer "
                "into a manual loop"
            )
        if trainer.gradient_clip_val and (trainer.gradient_clip_algorithm or "norm") != "norm":
            raise ValueError("gradients that are clipped by value cannot be mixed; clip their norm")
        if str(trainer.precision).startswith("16"):
            raise ValueError(
                f"precision={trainer.precision} scales the loss, which cannot be mixed; use bf16-mixed"
            )
        _refuse_strategy(trainer)
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise ValueError("the number of steps is not known; give max_steps to the Trainer")
        self.mixer = Mixer(
            # As the strategy has wrapped it, which determines how gradients are averaged over ranks.
            trainer.strategy.model or pl_module,
            trainer.optimizers[0],
            self.data.names,
            budget=int(steps),
            clip_norm=trainer.gradient_clip_val or None,
            **self._settings,
        )
        if self._saved is not None:
            here: dict[str, Tensor] = self.mixer.state_dict()["tensors"]
            saved: dict[str, Tensor] = self._saved["tensors"]
            own = {name: distributed.from_local(t, here.get(name, t)) for name, t in saved.items()}
            self.mixer.load_state_dict({**self._saved, "tensors": own})
            self._saved = None
        if self._followed is not None:
            self._followed.mixer = self.mixer
        self._set_weights()
        place = self.data.state_dict()
        self._places = place, place

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Capture the layers from here to the end of the backward pass."""
        assert self._places is not None
        self._places = self._places[1], self.data.state_dict()
        given = batch if self._followed is None else self._followed.next()
        self._batch.open(self.mixer, given, loss_divisor=trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the batch."""
        self._batch.close()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clip, and fold the step into the traces."""
        self.mixer.before_step()
        self._stepping = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, and the round if it is done."""
        if self._batch.is_open:
            raise RuntimeError(
                "training_step gave no loss that was differentiated; return mixing.weighted_loss(losses)"
            )
        stepped, self._stepping = self._stepping, False
        if stepped:
            self.mixer.after_step()
        if self.mixer.validation_due:
            self._validate(trainer, pl_module)
        record = self.mixer.round_ended
        if record is not None and stepped:
            self._set_weights()
            pl_module.log_dict(loggers.named(record))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the loader's workers."""
        if isinstance(self.data, MixtureLoader):
            self.data.shutdown_workers()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks from the model."""
        self._batch.abandon(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the mixer and the place in the data of every rank, for Lightning's checkpoints."""
        if not hasattr(self, "mixer"):  # a checkpoint from before the training
            return {}
        here, ahead = self._places or (self.data.state_dict(),) * 2
        # Lightning may save between the micro-batches of a step.
        saved = self.mixer.state_dict(forget_step=True)
        own = {
            # Each rank saves its part of sharded tensors.
            "mixer": {**saved, "tensors": {k: distributed.to_local(t) for k, t in saved["tensors"].items()}},
            "data": self._place(here, ahead),
            "validated": self._validation.taken,
        }
        return {"processes": distributed.all_gather_object(own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the mixer is made."""
        if not state_dict:
            return
        states = state_dict["processes"]
        if distributed.world_size() != len(states):
            raise ValueError(
                f"the checkpoint is of {len(states)} processes, and there are {distributed.world_size()}; each "
                "has its own place in the data, so start as many. To continue with another number, begin a "
                "new run from the checkpoint's model, with the weights of the run: mixer={'weights': ...}"
            )
        own = states[distributed.rank()]
        self._saved = own["mixer"]
        self.data.load_state_dict(own["data"])
        self._validation.skip(int(own["validated"]) - self._validation.taken)

    @property
    def batches(self) -> FollowedBatches:
        """The batches of a :class:`mixwell.MixtureLoader`, for ``Trainer.fit``."""
        if self._followed is None:
            raise ValueError(
                "only a MixtureLoader makes batches; give fit a DataLoader of the MixtureDataset"
            )
        return self._followed

    # ------------------------------------------------------------------------------------------- inside

    def _set_weights(self) -> None:
        if isinstance(self.data, MixtureDataset):
            self.data.weights = self.mixer.weights.last

    def _place(self, here: dict[str, Any], ahead: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.data, MixtureDataset):
            # The next batch was drawn before the weights were updated, if they were.
            return {**here, "weights": ahead["weights"]}
        # The rows of a loader with a length are not fetched ahead.
        return here if self.data.streams else ahead

    def _validate(self, trainer: Trainer, module: LightningModule) -> None:
        precision: Any = trainer.precision_plugin
        batch = module.transfer_batch_to_device(self._validation.next(), module.device, 0)
        module.eval()
        with self.mixer.validation() as scope:
            with precision.train_step_context():
                loss = self._mean_loss(module, precision.convert_input(batch))
            loss.backward()
            scope.record_loss(loss)
        module.train()

    def _mean_loss(self, module: LightningModule, batch: Any) -> Tensor:
        with torch.enable_grad():
            if self._loss is not None:
                return self._loss(module, batch)
            with _not_logging(module):
                found: Any = module.training_step(batch, 0)
        return found["loss"] if isinstance(found, Mapping) else found


def _refuse_strategy(trainer: Trainer) -> None:
    """Refuse strategies that keep gradients from the mixer, or in which ranks share the rows of a batch."""
    name = type(trainer.strategy).__name__
    if "DeepSpeed" in name:
        raise ValueError(
            "DeepSpeed keeps the gradients to itself and cannot be mixed; use strategy='ddp', or "
            "ModelParallelStrategy with fully_shard"
        )
    if name == "ModelParallelStrategy":
        mesh: Any = cast("Any", trainer.strategy).device_mesh
        size = mesh["tensor_parallel"].size()
        if size > 1:
            raise ValueError(
                f"{size} processes share each layer (tensor_parallel_size), which cannot be mixed; give "
                f"ModelParallelStrategy(data_parallel_size={distributed.world_size()}, tensor_parallel_size=1) "
                "and shard with fully_shard"
            )


@contextmanager
def _not_logging(module: LightningModule) -> Generator[None]:
    """Keep ``training_step`` from logging values of a validation batch as those of training."""
    vars(module).update(log=_nothing, log_dict=_nothing)
    try:
        yield
    finally:
        del module.log, module.log_dict


def _nothing(*_: Any, **__: Any) -> None: ...
