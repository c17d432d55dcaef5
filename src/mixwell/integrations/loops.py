"""Mixing in a plain loop that keeps its optimizer's step, as with Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixwell import distributed
from mixwell.data.datasets import moved
from mixwell.hypergradient.responses import unwrap_optimizer
from mixwell.integrations.batches import Labels, MixedBatches, ValidationBatches, settings_for
from mixwell.integrations.datasets import Interleaved
from mixwell.mixer.mixer import Mixer

__all__ = ["Interleaved", "MixerLoop"]


@final
class MixerLoop:
    """Learns the weights of the domains around a plain loop; ``optimizer.step()`` stays where it is.

    ::

        rows = Interleaved({"web": web, "code": code})
        loader = DataLoader(rows, batch_size=64)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)     # where Accelerate is used
        loop = MixerLoop(loader, model, optimizer, validation, row_losses, mixer={"budget": 20_000})
        for batch in loop:                                                           # in place of loader
            accelerator.backward(loop.weighted_loss(row_losses(model, batch)))               # in place of .mean()
            optimizer.step()
            optimizer.zero_grad()
        loop.mixer.weights.average

    The model must be run on the batch of the loop within its body. The optimizer tells the mixer when it steps,
    so that gradient accumulation, as ``accelerator.accumulate(model)`` does it, works. Let the mixer clip the
    gradient (``mixer={"clip_norm": 1.0}``), which it has to know of. The loop ends with the loader or with the
    budget.

    With several processes do not prepare the loader, and give each process rows of its own (``rank`` and
    ``processes`` of :class:`Interleaved`). A prepared loader fetches one batch ahead, which a resumed run passes
    over.

    Args:
        loader: batches of an :class:`Interleaved`, with the name of each row's domain.
        model: to be trained, wrapped or not.
        optimizer: trains it, wrapped or not.
        validation: batches, such as a ``DataLoader``; one is taken for every validation gradient (eight in a
            round, by default); ``mixer.validation_rows`` gives a size.
        losses: from the model and a batch the loss of each row.
        rows: the training data; by default found in ``loader.dataset``.
        labels: from a batch the domain of each row; by default its column ``domain``, or the last part of a tuple.
        mixer: settings of :class:`mixwell.Mixer` by keyword, of which ``budget`` or ``horizon`` is needed.

    Raises:
        ValueError: the loader does not read from an :class:`Interleaved`, or a setting is wrong.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        optimizer: Optimizer,
        validation: Iterable[Any],
        losses: Callable[[nn.Module, Any], Tensor],
        *,
        rows: Interleaved | None = None,
        labels: Labels | None = None,
        mixer: Mapping[str, Any] | None = None,
    ) -> None:
        if type(loader).__name__ == "DataLoaderDispatcher" and not distributed.is_single_process():
            raise ValueError(
                "Accelerate would send batches from one process to the others, and cannot send the names of "
                "domains; do not prepare the loader, and let each process read rows of its own: Interleaved(..., "
                "rank=accelerator.process_index, processes=accelerator.num_processes)"
            )
        if getattr(optimizer, "scaler", None) is not None:
            raise ValueError("fp16 scales the loss, which cannot be mixed; use bf16")
        self.rows = _found_in(loader) if rows is None else rows
        """The training data, whose weights follow."""
        settings = settings_for(self.rows, mixer, taken={"inclusion"})
        self.mixer = Mixer(model, optimizer, self.rows.names, **settings)
        """Learns the weights."""
        self.rows.weights = self.mixer.weights.last
        self._loader, self._model, self._losses = loader, model, losses
        self._validation = ValidationBatches(validation)
        self._batches = MixedBatches(self.rows, labels)
        self._place: torch.device = next(model.parameters()).device
        self._stepping = unwrap_optimizer(optimizer)

    def __iter__(self) -> Iterator[Any]:
        with ExitStack() as hooks:
            hooks.callback(self._stepping.register_step_pre_hook(self._before_step).remove)
            hooks.callback(self._stepping.register_step_post_hook(self._after_step).remove)
            yield from self._watched()

    def _watched(self) -> Iterator[Any]:
        for batch in self._loader:
            if self.mixer.budget is not None and self.mixer.steps_done >= self.mixer.budget:
                return
            self._batches.open(self.mixer, batch)
            try:
                yield batch
            except BaseException as error:
                self._batches.abandon(error)
                raise
            if self._batches.is_open:
                self._batches.close()

    def weighted_loss(self, losses: Tensor) -> Tensor:
        """The loss to call ``.backward()`` on.

        Args:
            losses: one for each row, or with more dimensions after the first, of which the mean is taken.

        Returns:
            One number.
        """
        return self._batches.weighted_loss(losses)

    def state_dict(self) -> dict[str, Any]:
        """The mixer and the place in the data of this process; the loop saves the model and the optimizer."""
        return {
            "processes": distributed.world_size(),
            "mixer": self.mixer.state_dict(),
            "rows": self.rows.state_dict(),
            "validated": self._validation.taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loop stopped, between two steps.

        Args:
            state: what :meth:`state_dict` gave in this process, of as many.

        Raises:
            ValueError: it is of another number of processes, other data or other settings.
        """
        if state["processes"] != distributed.world_size():
            raise ValueError(
                f"the state is of one of {state['processes']} processes, and there are "
                f"{distributed.world_size()}; each has its own place in the data, so start as many"
            )
        self.mixer.load_state_dict(state["mixer"])
        self.rows.load_state_dict(state["rows"])
        self._validation.skip(int(state["validated"]) - self._validation.taken)

    def _before_step(self, *_: Any) -> None:
        self._batches.close()
        self.mixer.before_step()

    def _after_step(self, *_: Any) -> None:
        self.mixer.after_step()
        if self.mixer.validation_due:
            self._validate()
        if self.mixer.round_ended is not None:
            self.rows.weights = self.mixer.weights.last

    def _validate(self) -> None:
        training = self._model.training
        self._model.eval()
        with self.mixer.validation() as scope, torch.enable_grad():
            loss = self._losses(self._model, moved(self._validation.next(), self._place)).mean()
            loss.backward()
            scope.record_loss(loss)
        self._model.train(training)


def _found_in(loader: Any) -> Interleaved:
    found = getattr(loader, "dataset", None)
    while found is not None and not isinstance(found, Interleaved):
        found = getattr(found, "dataset", None)
    if found is None:
        raise ValueError(
            "the loader does not read from mixwell.integrations.datasets.Interleaved, whose weights could follow; "
            "make it of one, or give it as rows=..."
        )
    return found
