"""Mixing in a plain loop that keeps its optimizer's step, as with Accelerate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.data.loader import MixtureLoader
from mixwell.data.mixture_dataset import MixtureDataset
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.integrations.batches import Labels, MixtureData, OpenBatch, ValidationBatches, settings_for
from mixwell.mixer.batch import MixtureBatch
from mixwell.mixer.mixer import Mixer
from mixwell.utils.nested import to_device

__all__ = ["MixerLoop", "MixtureLoader"]


@final
class MixerLoop:
    """Learns the weights of the domains around a plain loop; ``optimizer.step()`` stays where it is.

    ::

        loader = MixtureLoader({"web": web, "code": code}, batch_size=64)
        model, optimizer = accelerator.prepare(model, optimizer)                     # where Accelerate is used
        loop = MixerLoop(loader, model, optimizer, validation, row_losses, mixer={"budget": 20_000})
        for rows in loop:                                                            # in place of loader
            accelerator.backward(loop.weighted_loss(row_losses(model, rows)))        # in place of .mean()
            optimizer.step()
            optimizer.zero_grad()
        loop.mixer.weights.average

    The model must be run on the rows of the loop within its body. A hook of the optimizer notifies the mixer of
    each step, so that gradient accumulation works, with ``accelerator.accumulate(model)`` or by hand; the loader
    needs the same number of ``micro_batches``. Let the mixer clip the gradient (``mixer={"clip_norm": 1.0}``),
    which changes the traces. The loop ends with the loader or with the budget.

    The loader may also be a ``DataLoader`` of a :class:`mixwell.data.mixture_dataset.MixtureDataset`. With several
    ranks do not prepare it, and give each rank rows of its own (``rank`` and ``world_size`` of the dataset). A
    prepared loader fetches one batch ahead, which a resumed run skips.

    Args:
        loader: makes the batches.
        model: to be trained, wrapped or not.
        optimizer: trains it; with Accelerate as ``accelerator.prepare`` returned it, which shows that
            ``accelerator.backward`` divides the loss by the number of micro-batches.
        validation: batches, such as a ``DataLoader``; one is taken for every validation gradient (eight in a
            round, by default); ``mixer.validation_rows`` gives a size.
        losses: from the model and a batch the loss of each row.
        data: the dataset that a ``DataLoader`` reads; by default found in ``loader.dataset``.
        labels: from a batch of a ``DataLoader`` the domain of each row; by default its column ``domain``, or the
            last part of a tuple.
        mixer: settings of :class:`mixwell.Mixer` by keyword; ``budget`` or ``horizon`` is needed.
    """

    def __init__(
        self,
        loader: MixtureLoader | Iterable[Any],
        model: nn.Module,
        optimizer: Optimizer,
        validation: Iterable[Any],
        losses: Callable[[nn.Module, Any], Tensor],
        *,
        data: MixtureDataset | None = None,
        labels: Labels | None = None,
        mixer: Mapping[str, Any] | None = None,
    ) -> None:
        if type(loader).__name__ == "DataLoaderDispatcher" and not distributed.is_single_process():
            raise ValueError(
                "Accelerate would send batches from one process to the others, and cannot send the names of "
                "domains; take a MixtureLoader, or do not prepare the loader and let each rank read rows "
                "of its own: MixtureDataset(..., rank=accelerator.process_index, "
                "world_size=accelerator.num_processes)"
            )
        if getattr(optimizer, "scaler", None) is not None:
            raise ValueError("fp16 scales the loss, which cannot be mixed; use bf16")
        self.data: MixtureData = _data_of(loader) if data is None else data
        """The training data."""
        settings = settings_for(self.data, mixer, reserved=set())
        self.mixer = Mixer(model, optimizer, self.data.names, **settings)
        """Learns the weights."""
        self._set_weights()
        self._loader, self._model, self._losses = loader, model, losses
        self._validation = ValidationBatches(validation)
        self._batch = OpenBatch(self.data, labels)
        self._place: torch.device = next(model.parameters()).device
        self._optimizer, self._stepping = optimizer, unwrap_optimizer(optimizer)

    def __iter__(self) -> Iterator[Any]:
        with ExitStack() as hooks:
            hooks.callback(self._stepping.register_step_pre_hook(self._before_step).remove)
            hooks.callback(self._stepping.register_step_post_hook(self._after_step).remove)
            yield from self._watched()

    def _watched(self) -> Iterator[Any]:
        loader = self._loader
        for batch in loader.follow(self.mixer) if isinstance(loader, MixtureLoader) else loader:
            if self.mixer.budget is not None and self.mixer.steps_done >= self.mixer.budget:
                return
            self._batch.open(self.mixer, batch, loss_divisor=self._loss_divisor())
            try:
                yield to_device(batch.rows, self._place) if isinstance(batch, MixtureBatch) else batch
            except BaseException as error:
                self._batch.abandon(error)
                raise
            if self._batch.is_open:
                self._batch.close()

    def _loss_divisor(self) -> int:
        """Return the number by which ``accelerator.backward`` divides the loss; a plain ``.backward()`` does not.

        It is read for each batch, since users may set ``accelerator.gradient_accumulation_steps`` between steps.
        """
        state = getattr(self._optimizer, "gradient_state", None)
        if state is not None:
            return state.num_steps
        parts = self.data.micro_batches if isinstance(self.data, MixtureLoader) else 1
        # The state exists once there is an Accelerator in this process; without one it must not be created.
        known = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
        if parts > 1 and known is not None and known._shared_state and known().num_steps == parts:
            raise ValueError(
                "Accelerate divides the loss by gradient_accumulation_steps, which MixerLoop must undo: give it "
                "the model and the optimizer that accelerator.prepare(model, optimizer) returned"
            )
        return 1

    def weighted_loss(self, losses: Tensor) -> Tensor:
        """Return the loss to call ``.backward()`` on.

        Args:
            losses: one for each row, or with more dimensions after the first, of which the mean is taken.
        """
        return self._batch.weighted_loss(losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the mixer and the place in the data of this rank; save model and optimizer yourself."""
        return {
            "processes": distributed.world_size(),
            "mixer": self.mixer.state_dict(),
            "data": self.data.state_dict(),
            "validated": self._validation.taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loop stopped, between two steps, with the state of the same rank."""
        if state["processes"] != distributed.world_size():
            raise ValueError(
                f"the state is of one of {state['processes']} processes, and there are "
                f"{distributed.world_size()}; each has its own place in the data, so start as many"
            )
        self.mixer.load_state_dict(state["mixer"])
        self.data.load_state_dict(state["data"])
        self._validation.skip(int(state["validated"]) - self._validation.taken)

    def _before_step(self, *_: Any) -> None:
        self._batch.close()
        self.mixer.before_step()

    def _after_step(self, *_: Any) -> None:
        self.mixer.after_step()
        if self.mixer.validation_due:
            self._validate()
        if self.mixer.round_ended is not None:
            self._set_weights()

    def _set_weights(self) -> None:
        if isinstance(self.data, MixtureDataset):
            self.data.weights = self.mixer.weights.last

    def _validate(self) -> None:
        training = self._model.training
        self._model.eval()
        with self.mixer.validation() as scope, torch.enable_grad():
            loss = self._losses(self._model, to_device(self._validation.next(), self._place)).mean()
            loss.backward()
            scope.record_loss(loss)
        self._model.train(training)


def _data_of(loader: Any) -> MixtureData:
    if isinstance(loader, MixtureLoader):
        return loader
    found = getattr(loader, "dataset", None)
    while found is not None and not isinstance(found, MixtureDataset):
        found = getattr(found, "dataset", None)
    if found is None:
        raise ValueError(
            "the loader is no MixtureLoader, and does not read from a MixtureDataset, so that nothing "
            "follows the weights; make it of one, or give that as data=..."
        )
    return found
